"""What is chosen for each layer of the blocks: FP8, adapters, and what backward computes again.

FP8: a linear layer has a weight [n, k] on a rank and m tokens. torch's scaled product (`torch._scaled_mm`, by cuBLASLt)
needs the summed dimension and the last dimension of the second factor to be multiples of 16: k and n for the output, n
and k for the input's gradient, m and k for the weight's gradient. Other products run in the compute dtype. So do
embedding and head always, as in NVIDIA's Transformer Engine: the loss is most sensitive to rounding in the head.

Adapters are those of LoRA (Hu et al. 2021, arXiv:2106.09685).
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.inventory import TP_AXIS, block, linears
from megazero.config.schema import LoraConfig, ModelConfig, Run

FP8_MULTIPLE = 16


@dataclass(frozen=True)
class Layer:
    """A product of every block: the layer's name within the block, and its weight [n, k] on one tp rank.

    Gate and up of a gated feed-forward layer are one product, under the gate's name.
    """

    name: str
    n: int
    k: int

    @property
    def fits(self) -> bool:
        """Whether its output and its input's gradient can be computed in FP8."""
        return self.n % FP8_MULTIPLE == 0 and self.k % FP8_MULTIPLE == 0


def block_layers(model: ModelConfig, tp: int) -> tuple[Layer, ...]:
    """The products of a block's linear layers."""
    products: dict[str, Layer] = {}
    for linear in linears(model):
        n, k = linear.on_rank(tp)
        before = products[linear.product].n if linear.product in products else 0
        products[linear.product] = Layer(linear.product, before + n, k)
    return tuple(products.values())


def fp8_layers(run: Run) -> tuple[str, ...]:
    """Global names ("blocks.3.mlp.up") of all layers of the model that run in FP8, in model order."""
    if run.optimizer.fp8 == "off":
        return ()
    names = [layer.name for layer in block_layers(run.model, run.parallel.tp) if layer.fits]
    return tuple(f"{block(number)}.{name}" for number in range(run.model.num_layers) for name in names)


def fp8_exceptions(run: Run) -> list[str]:
    """The products of the blocks that do not run in FP8, each with the sizes that prevent it."""
    layers, tokens = block_layers(run.model, run.parallel.tp), run.model.seq_length * run.schedule.micro_batch_size
    exceptions = [
        f"{layer.name} ({layer.n} x {layer.k} on a rank: not multiples of {FP8_MULTIPLE})"
        for layer in layers
        if not layer.fits
    ]
    if tokens % FP8_MULTIPLE:
        exceptions.append(f"gradients of weights ({tokens} tokens of a micro-batch: not a multiple of {FP8_MULTIPLE})")
    return exceptions


LORA_TARGETS = tuple(name.rpartition(".")[2] for name in TP_AXIS)
"""The linear layers of a block that can have adapters, by the last part of their names."""

BASE_BITS = (4, 8)
"""The bits of a code as which a frozen matrix can be stored."""


def adaptable_layers(model: ModelConfig) -> tuple[str, ...]:
    """The linear layers of this model's blocks, by the last part of their names."""
    return tuple(linear.name.rpartition(".")[2] for linear in linears(model))


def adapted(lora: LoraConfig, model: ModelConfig) -> tuple[str, ...]:
    """The linear layers of a block that get adapters, in the order of the block; none without --lora-rank."""
    if lora.lora_rank is None:
        return ()
    return tuple(name for name in adaptable_layers(model) if not lora.lora_targets or name in lora.lora_targets)


def lora_alpha(lora: LoraConfig) -> float:
    """--lora-alpha, else twice the rank."""
    assert lora.lora_rank is not None
    return 2.0 * lora.lora_rank if lora.lora_alpha is None else lora.lora_alpha


def lora_scale(lora: LoraConfig) -> float:
    """The factor of B A x: alpha / rank."""
    assert lora.lora_rank is not None
    return lora_alpha(lora) / lora.lora_rank


NONE, SELECTIVE, FULL = RECOMPUTE = ("none", "selective", "full")
"""What is computed again of one block: nothing, the attention core, or the whole block."""

RecomputeTable = tuple[str, ...]
"""A word of `RECOMPUTE` for every block of the model, by its global number."""


def every_kth(layers: int, kind: str, every: int = 1) -> RecomputeTable:
    """The table of `layers` blocks in which backward computes `kind` again.

    every: with "full", only blocks whose number is a multiple of it; the others keep their activations. Raises
    ValueError for an unknown kind, and for `every` below 1.
    """
    if kind not in RECOMPUTE:
        raise ValueError(f"--recompute-granularity {kind}: choose {', '.join(RECOMPUTE)}")
    if every < 1:
        raise ValueError(f"--recompute-num-layers {every} is less than 1")
    return tuple(kind if kind != FULL or number % every == 0 else NONE for number in range(layers))


def recompute_by_flags(run: Run) -> RecomputeTable:
    """The table that the run's flags fill."""
    p = run.parallel
    return every_kth(run.model.num_layers, p.recompute_granularity, p.recompute_num_layers)
