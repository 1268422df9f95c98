"""The families, and their tensors from and to ours."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megazero.config.schema import ModelConfig
from megazero.convert.hf import bloom, gpt2, llama, opt
from megazero.convert.hf.tables import Family

FAMILIES: Mapping[str, Family] = {
    found.model_type: found for found in (bloom.FAMILY, gpt2.FAMILY, llama.FAMILY, opt.FAMILY)
}
"""By model_type, in the order in which they are tried for a model that came from elsewhere."""


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
