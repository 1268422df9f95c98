"""Low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import option


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA) on the frozen weights of --init-from."""

    lora_rank: int | None = option(None, metavar="R", derived="no adapters")
    "Rank of the adapters of linear layers in the blocks. Nothing else is trained."
    lora_alpha: float | None = option(None, derived="twice the rank", needs="--lora-rank R")
    "Adapters are scaled by alpha / rank."
    lora_targets: tuple[str, ...] = option(
        (), many=True, metavar="LAYER", derived="all that the model has", needs="--lora-rank R", expert=True
    )
    "Layers of every block that get an adapter, of qkv output gate up down."
    lora_dropout: float = option(0.0, needs="--lora-rank R", expert=True)
    "Dropout on the input of adapters only."
    lora_base_bits: int | None = option(None, metavar="{4,8}", derived="stored as they are", needs="--lora-rank R")
    """Store the frozen matrices of linear layers as codes of 4 bits (NF4 with double quantisation, as in QLoRA) or 8
    bits, and decode them for each use, unit by unit. Embeddings, head, norms and biases are stored as they are."""
    lora_base_qkv: str | None = option(
        None, choices=("one", "three"), derived="as in the model of --init-from", needs="--lora-base-bits", expert=True
    )
    """With --lora-base-bits: encode query, key and value as one matrix or as three. Scales of scales differ."""
