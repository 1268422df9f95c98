"""Model chunks: those in one rank's file, and all of them joined to one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megazero.convert.megatron.names import EMBEDDING, FINAL, NUMBERED
from megazero.convert.source import ConversionError

Chunk = dict[str, Tensor]
"""A model chunk's tensors by their names, layers counted within the chunk."""


def chunks_of(where: str, state: Mapping[str, Any]) -> list[Chunk]:
    """The model chunks of a rank: one, or one per virtual stage."""
    parts = [state["model"]] if "model" in state else []
    while f"model{len(parts)}" in state:
        parts.append(state[f"model{len(parts)}"])
    if not parts:
        raise ConversionError(f"{where} holds no model ('model', 'model0', ...)")
    return [flat(part) for part in parts]


def flat(nested: Mapping[str, Any], before: str = "") -> Chunk:
    """Nested dictionaries as one, with keys joined by dots.

    A value that is not a tensor (bytes of Transformer Engine) becomes an empty tensor under its name.
    """
    found: Chunk = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value if isinstance(value, Tensor) else torch.empty(0)
    return found


def in_model_order(stages: list[list[Chunk]]) -> list[Chunk]:
    """The chunks of one tp rank in the order of the layers: virtual stage v of every pipeline stage, then v + 1."""
    return [stage[v] for v in range(len(stages[0])) for stage in stages]


def misplaced(chunks: list[Chunk]) -> Iterator[str]:
    """The evidence that a tp rank's chunks are not in the model's order: only the first has an embedding, only the last
    a final norm.
    """
    last = len(chunks) - 1
    for names, right, what in ((EMBEDDING, 0, "first"), (FINAL, last, "last")):
        wrong = {
            number: name for number, chunk in enumerate(chunks) for name in names if name in chunk and number != right
        }
        if wrong:
            found = (
                f"{next(iter(wrong.values()))} is in model chunk "
                f"{' and '.join(str(number + 1) for number in wrong)} of {len(chunks)}"
            )
            yield f"{found}, not in the {what}: have files of stages been swapped?"


def numbered(chunks: list[Chunk]) -> Chunk:
    """All chunks as one, with layers numbered over the whole model."""
    whole: Chunk = {}
    before = 0
    for chunk in chunks:
        numbers = set()
        for key, value in chunk.items():
            match = NUMBERED.fullmatch(key)
            if match:
                numbers.add(int(match[2]))
                key = f"{match[1]}.{before + int(match[2])}.{match[3]}"
            whole[key] = value
        before += len(numbers)
    return whole
