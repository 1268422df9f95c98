"""Tensors of `transformers` as ours and back, by a family's table of names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megazero.config.schema import ModelConfig
from megazero.convert.hf.families import FAMILIES


def from_transformers(family: str, model: ModelConfig, name: str, state: Mapping[str, Tensor]) -> Tensor:
    """Our global tensor `name` from their state dict, whose keys may carry the family's prefix or not.

    Raises ValueError, naming what is missing.
    """
    names = FAMILIES[family].names
    rule = names.rule(name)
    found = [next((k for k in (names.prefix + key, key) if k in state), None) for key in rule.theirs]
    if None in found:
        raise ValueError(
            f"{name} is made of {', '.join(rule.theirs)}, of which the state dict holds {[k for k in found if k]}"
        )
    return rule.how.ours(model, [state[key] for key in found if key is not None])


def to_transformers(family: str, model: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Their tensors, with the family's prefix, from our global tensor `name`."""
    names = FAMILIES[family].names
    rule = names.rule(name)
    return dict(zip(names.written(rule), rule.how.theirs(model, tensor), strict=True))
