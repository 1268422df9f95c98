"""From logits to the next token. The rules apply in the same order as in `transformers`.

b rows, v vocabulary. Draws are made on the host in float64. They depend on the seed, the row's number and the step
only: not on the layout, and not on the other rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from megazero.config.schema import DataConfig
from megazero.system.reading import shown

NOT_FINITE = "the model's logits are not finite: in this precision its numbers overflow, or its weights are damaged"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature         0: the likeliest token; otherwise the logits are divided by it
    top_k               0: any token may be drawn; otherwise the k likeliest, and those that are as likely as the k-th
    top_p               only the fewest likeliest tokens whose probabilities reach this sum may be drawn (Holtzman et
                        al. 2019, arXiv:1904.09751)
    repetition_penalty  the logit of a token that the row already has is divided by it if positive, else multiplied
                        (CTRL: Keskar et al. 2019, arXiv:1909.05858); 1: no penalty
    seed                the seed of the draws

    Raises TypeError for what is no number, ValueError for values out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = DataConfig.seed

    def __post_init__(self) -> None:
        problems = [
            f"{known.name} is {type(value).__name__} {shown(value)}: it is a {'whole ' * whole}number"
            for known in fields(self)
            for value, whole in [(getattr(self, known.name), known.name in ("top_k", "seed"))]
            if not isinstance(value, Integral if whole else Real) or isinstance(value, bool)
        ]
        if problems:
            raise TypeError("; ".join(problems))
        if not 0 <= self.temperature < math.inf:
            problems.append(f"temperature ({self.temperature}) is not 0 or more")
        if self.top_k < 0:
            problems.append(f"top_k ({self.top_k}) is negative")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p ({self.top_p}) is not above 0 and at most 1")
        if not 0 < self.repetition_penalty < math.inf:
            problems.append(f"repetition_penalty ({self.repetition_penalty}) is not above 0")
        if not 0 <= self.seed < 1 << 64:
            problems.append(f"seed ({self.seed}) is not in [0, 2^64)")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Row:
    """A row of a batch. ids: its tokens so far; number: determines its draws; step: the number of new tokens so far."""

    ids: Sequence[int]
    number: int
    step: int


def choose(logits: Tensor, rows: Sequence[Row], sampling: Sampling) -> list[int]:
    """The next token of every row. logits: [b, v], of any dtype on any device.

    Raises FloatingPointError if a row's largest logit is not finite.
    """
    if sampling.temperature == 0 and sampling.repetition_penalty == 1:
        return _likeliest(logits.float() if logits.itemsize == 2 else logits)[1].tolist()
    scores = penalised(logits.double().cpu(), [row.ids for row in rows], sampling.repetition_penalty)
    largest, places = _likeliest(scores)
    if sampling.temperature == 0:
        return places.tolist()
    # The largest becomes 0 first, so that a division by a very small temperature leaves it finite.
    scores = among_likeliest((scores - largest.unsqueeze(1)) / sampling.temperature, sampling.top_k)
    ends = within_mass(scores, sampling.top_p).softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.tensor([[uniform(sampling.seed, row.number, row.step)] for row in rows], dtype=torch.float64)
    # Take the first token whose cumulative probability exceeds the number drawn. Rounding may leave none; then take the
    # last token with a probability.
    found = torch.searchsorted(ends, drawn * ends[:, -1:], right=True).squeeze(1)
    last = (ends < ends[:, -1:]).sum(dim=-1)
    return torch.minimum(found, last).tolist()


def _likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(the largest score of each row of [b, v], its first index)."""
    largest, places = scores.max(dim=-1)
    if not largest.isfinite().all():
        raise FloatingPointError(NOT_FINITE)
    return largest, places


def uniform(seed: int, number: int, step: int) -> float:
    """A number in [0, 1) from the seed, the row and the step (Philox: Salmon et al. 2011)."""
    # With uint64, since numpy would turn a list with a seed of 2^63 or more into floating-point numbers.
    key = np.array([seed, number], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=[step, 0, 0, 0])).random())


def penalised(scores: Tensor, ids: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Scores [b, v] in which those of each row's own tokens are lowered once, however often the row has them."""
    if penalty == 1:
        return scores
    scores = scores.clone()
    for row, own in zip(scores, ids, strict=True):
        held = torch.tensor(
            [number for number in set(own) if number < row.shape[0]], dtype=torch.int64, device=row.device
        )
        before = row[held]
        row[held] = torch.where(before < 0, before * penalty, before / penalty)
    return scores


def among_likeliest(scores: Tensor, count: int) -> Tensor:
    """Scores [b, v] with -inf for those below the row's `count`-th largest; 0: unchanged."""
    if not 0 < count < scores.shape[-1]:
        return scores
    least = scores.topk(count, dim=-1).values[:, -1:]
    return scores.masked_fill(scores < least, float("-inf"))


def within_mass(scores: Tensor, mass: float) -> Tensor:
    """Scores [b, v] with -inf for all but the fewest likeliest tokens whose probabilities reach `mass`; at least one
    stays.
    """
    if mass >= 1:
        return scores
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    shares = ordered.softmax(dim=-1)
    outside = shares.cumsum(dim=-1) - shares >= mass
    outside[:, 0] = False
    return scores.masked_fill(torch.zeros_like(outside).scatter_(1, places, outside), float("-inf"))
