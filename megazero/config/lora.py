"""Which layers of a run get low-rank adapters, and their scale (LoRA: Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from megazero.config.inventory import TP_AXIS, linears
from megazero.config.schema import LoraConfig, ModelConfig

TARGETS = tuple(name.rpartition(".")[2] for name in TP_AXIS)
"""The linear layers of a block that can have adapters, by the last part of their names."""

BASE_BITS = (4, 8)
"""The bits of a code as which a frozen matrix can be stored."""


def layers_of(model: ModelConfig) -> tuple[str, ...]:
    """The linear layers of this model's blocks, by the last part of their names."""
    return tuple(linear.name.rpartition(".")[2] for linear in linears(model))


def adapted(lora: LoraConfig, model: ModelConfig) -> tuple[str, ...]:
    """The linear layers of a block that get adapters, in the order of the block; none without --lora-rank."""
    if lora.lora_rank is None:
        return ()
    return tuple(name for name in layers_of(model) if not lora.lora_targets or name in lora.lora_targets)


def alpha(lora: LoraConfig) -> float:
    """--lora-alpha, else twice the rank."""
    assert lora.lora_rank is not None
    return 2.0 * lora.lora_rank if lora.lora_alpha is None else lora.lora_alpha


def scale(lora: LoraConfig) -> float:
    """The factor of B A x: alpha / rank."""
    assert lora.lora_rank is not None
    return alpha(lora) / lora.lora_rank
