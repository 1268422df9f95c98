"""Learning rate as a function of the samples or iterations before a step.

A run counts in samples if one of its lengths is given in samples, else in iterations. The count of a step is the number
of samples consumed (or iterations done) before it. So the first step of a run with warm-up has rate 0, as BLOOM's had.
The formulas are Megatron-LM's; `wsd` is warm-up, constant, and a linear fall over the last part (arXiv:2404.06395).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import SupportsFloat

from megazero.config.batch_schedule import BatchSchedule
from megazero.config.lengths import Length, Measure
from megazero.config.schema import ScheduleConfig
from megazero.system.extensions import LR_DECAY_STYLES, load, refuse_twin

WSD_SHARE = 0.1
"""Default length of wsd's falling part, as a fraction of the decay's length."""


class LearningRate:
    """The learning rate of a run's steps; `at(iterations, consumed)` computes it.

    Where the run counts in samples, a length of n iterations becomes the samples that the run's first n iterations
    consume. Raises ValueError for an unknown style, for a decaying style in a run without a length, and for a warm-up
    that is a share without a length to take it of.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self.config, self.batches, self.style = config, BatchSchedule(config), style_of(config.lr_decay_style)
        lengths = (config.lr_warmup, config.lr_decay, config.lr_wsd_decay)
        counted = {length.measure for length in lengths if length is not None}
        self.counts_samples = Measure.SAMPLES in counted or config.train_samples is not None
        whole = config.lr_decay or config.train_length
        # The number of samples in an epoch is known once the data are read; `train.resolve` then replaces the epochs.
        self.decay = None if whole is None or whole.measure is Measure.EPOCHS else self._length(whole)
        if self.decay is None and config.lr_warmup is not None and config.lr_warmup.measure is Measure.SHARE:
            raise ValueError(
                f"{config.lr_warmup.behind('--lr-warmup')} is a share of --lr-decay or the run's length: give one"
            )
        self.warmup = 0 if config.lr_warmup is None else self._length(config.lr_warmup)
        if self.decay is None and self.style is not None:
            raise ValueError(f"--lr-decay-style {config.lr_decay_style} needs --train-length or a length of its own")
        fall = config.lr_wsd_decay
        self.fall = WSD_SHARE * (self.decay or 0) if fall is None else self._length(fall)

    def _length(self, length: Length) -> float:
        """A length in what the run counts. A share is one of `decay`, which is known by then."""
        if length.measure is Measure.SHARE:
            return length.number * (self.decay or 0)
        if length.measure is Measure.ITERATIONS and self.counts_samples:
            return self.batches.consumed_after(int(length.number))
        return length.number

    def at(self, iterations: int, consumed: int) -> float:
        """The rate of the step that follows `iterations` iterations and `consumed` samples.

        Raises ValueError where an installed style gives a rate that is negative or not finite.
        """
        return self._rate(consumed if self.counts_samples else iterations)

    def _rate(self, count: int) -> float:
        highest, lowest = self.config.lr, self.config.min_lr
        if self.warmup > 0 and count <= self.warmup:
            return highest * count / self.warmup
        if self.style is None:
            return highest
        assert self.decay is not None
        if count > self.decay:
            return lowest
        given = self.style(Decay(count, self.warmup, self.decay, self.fall, highest, lowest))
        rate = float(given) if isinstance(given, SupportsFloat) else math.nan
        if not 0 <= rate < math.inf:
            raise ValueError(f"--lr-decay-style {self.config.lr_decay_style} gives a rate of {given!r} at {count}")
        return rate


@dataclass(frozen=True)
class Decay:
    """A step in the decaying part of a run. All lengths count samples, or all count iterations.

    count    samples or iterations before the step: more than `warmup` (from 0 on without one), at most `decay`
    warmup   length of the warm-up, 0 without one
    decay    length of warm-up and decay together
    fall     length of wsd's falling part
    highest  the peak rate (--lr)
    lowest   the rate at the end of the decay (--min-lr)
    """

    count: int
    warmup: float
    decay: float
    fall: float
    highest: float
    lowest: float

    @property
    def ratio(self) -> float:
        """The step's position in the decay: 0 after the warm-up, 1 at the end."""
        return (self.count - self.warmup) / (self.decay - self.warmup)

    def between(self, share: float) -> float:
        """lowest + share * (highest - lowest)."""
        return self.lowest + share * (self.highest - self.lowest)


def linear(at: Decay) -> float:
    """A straight line down to the lowest rate."""
    return at.between(1.0 - at.ratio)


def cosine(at: Decay) -> float:
    """Half a wave of the cosine (Loshchilov and Hutter 2017, arXiv:1608.03983)."""
    return at.between(0.5 * (math.cos(math.pi * at.ratio) + 1.0))


def inverse_square_root(at: Decay) -> float:
    """highest * sqrt(warmup / count), at least the lowest rate."""
    return max(at.lowest, at.highest * math.sqrt(max(at.warmup, 1) / max(at.count, 1)))


def wsd(at: Decay) -> float:
    """Constant, then a straight line over the last `fall` of the decay (Hu et al. 2024, arXiv:2404.06395)."""
    return at.between(1.0 if at.count <= at.decay - at.fall else (at.decay - at.count) / at.fall)


STYLES: Mapping[str, Callable[[Decay], float]] = MappingProxyType(
    {"linear": linear, "cosine": cosine, "inverse-square-root": inverse_square_root, "wsd": wsd}
)
"""The styles of --lr-decay-style, except `constant`, which needs no length."""


def style_of(name: str) -> Callable[[Decay], float] | None:
    """The function of a style, ours or an installed package's; None for `constant`. Raises ValueError if unknown."""
    if name == "constant" or name in STYLES:
        refuse_twin(LR_DECAY_STYLES, name)
        return STYLES.get(name)
    found: Callable[[Decay], float] = load(LR_DECAY_STYLES, name)
    return found
