"""The angles by which rotary positions turn, scaled for sequences longer than those of the first training.

d the elements of a head that turn, theta_i = base^(-2i/d) the inverse frequency of pair i, L the sequence length of the
first training. All in float64. The names of kinds and keys are those of transformers' `ROPE_INIT_FUNCTIONS`, which
computes the same in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.config.rotary import RotaryScaling, RotarySettings

Scaled = tuple[Tensor, float]
"""(inverse frequencies fp64 [d/2], the factor of cos and sin)."""


def rotary_frequencies(
    head_dim: int,
    settings: RotarySettings,
    length: int = 0,
    trained_length: int = 0,
    device: torch.device | str = "cpu",
) -> Scaled:
    """(inverse frequencies fp64 [d/2], attention factor, by which cos and sin are multiplied).

    length          of the sequence, for the kinds that depend on it (`length_that_counts`); 0: not longer than trained
    trained_length  the model's number of positions, where the scaling does not name the length of its first training
                    (dynamic) or its factor (longrope)

    Raises ValueError for a head without pairs, lists of another length than d/2, and a trained length that is missing.
    """
    d, scaling = settings.turned(head_dim), settings.scaling
    exponents = torch.arange(0, d, 2, dtype=torch.float64, device=device) / d
    if scaling is None:
        return settings.base**-exponents, 1.0
    return _KINDS[scaling.kind](scaling, settings.base, exponents, length, trained_length)


def length_that_counts(settings: RotarySettings, length: int, trained_length: int = 0) -> int:
    """A length with the same frequencies as `length`: equal numbers have equal frequencies."""
    scaling = settings.scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return 0
    original = scaling.original(trained_length)
    if length <= original:
        return 0
    return length if scaling.kind == "dynamic" else original + 1


def _linear(scaling: RotaryScaling, base: float, exponents: Tensor, length: int, trained: int) -> Scaled:
    """theta / factor: positions lie closer (Chen et al. 2023, arXiv:2306.15595)."""
    return base**-exponents / scaling.number("factor", 1.0), 1.0


def _dynamic(scaling: RotaryScaling, base: float, exponents: Tensor, length: int, trained: int) -> Scaled:
    """A larger base, so that the slowest pair turns as far over the whole sequence as over L (NTK-aware, with the
    sequence's own length; named by its authors in r/LocalLLaMA, 2023).
    """
    d, factor, original = 2 * len(exponents), scaling.number("factor", 1.0), scaling.original(trained)
    if d == 2:
        raise ValueError("rotary scaling dynamic needs more than one pair of elements that turns in each head")
    stretched = base * (factor * max(length, original) / original - (factor - 1)) ** (d / (d - 2))
    return stretched**-exponents, 1.0


def _llama3(scaling: RotaryScaling, base: float, exponents: Tensor, length: int, trained: int) -> Scaled:
    """theta / factor where a turn takes more than L / low positions, theta where less than L / high, and a mixture
    between (Llama 3.1: Grattafiori et al. 2024, arXiv:2407.21783).
    """
    low, high = scaling.number("low_freq_factor", 1.0), scaling.number("high_freq_factor", 4.0)
    theta = base**-exponents
    turns = scaling.original(trained) * theta / (2 * math.pi)  # of a pair over L
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return theta * (kept + (1 - kept) / scaling.number("factor", 1.0)), 1.0


def _yarn(scaling: RotaryScaling, base: float, exponents: Tensor, length: int, trained: int) -> Scaled:
    """theta for pairs that turn `beta_fast` times or more over L, theta / factor for those that turn `beta_slow` times
    or less, a ramp between (Peng et al. 2023, arXiv:2309.00071).
    """
    d, original, factor = 2 * len(exponents), scaling.original(trained), scaling.number("factor", 1.0)

    def pair_that_turns(times: float) -> float:
        return d * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first = pair_that_turns(scaling.number("beta_fast", 32.0))
    last = pair_that_turns(scaling.number("beta_slow", 1.0))
    if scaling.number("truncate", 1.0):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    width = 0.001 if first == last else last - first  # as in the paper's own code: no division by 0
    slowed = ((torch.arange(d // 2, dtype=torch.float64, device=exponents.device) - first) / width).clamp(0, 1)
    theta = base**-exponents
    return theta * (1 - slowed) + theta / factor * slowed, _yarn_factor(scaling, factor)


def _yarn_factor(scaling: RotaryScaling, factor: float) -> float:
    """sqrt(1/t) of the paper, 0.1 ln(factor) + 1, or the quotient of two of them (DeepSeek-V2)."""

    def magnitude(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    over, under = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    derived = magnitude(over) / magnitude(under) if over and under else magnitude(1.0)
    return scaling.number("attention_factor", derived)


def _longrope(scaling: RotaryScaling, base: float, exponents: Tensor, length: int, trained: int) -> Scaled:
    """theta divided pair by pair, by other factors for sequences longer than L (Ding et al. 2024, arXiv:2402.13753)."""
    original = scaling.original(trained)
    name = "long_factor" if length > original else "short_factor"
    divisors = scaling.numbers(name)
    if len(divisors) != len(exponents):
        raise ValueError(f"rotary scaling longrope: {name} has {len(divisors)} numbers for {len(exponents)} pairs")
    factor = scaling.number("factor", trained / original)
    if factor <= 0:
        raise ValueError("rotary scaling longrope needs factor, or a model with a trained length")
    derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    theta = base**-exponents / torch.tensor(divisors, dtype=torch.float64, device=exponents.device)
    return theta, scaling.number("attention_factor", derived)


_KINDS: Mapping[str, Callable[[RotaryScaling, float, Tensor, int, int], Scaled]] = MappingProxyType(
    {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
)
