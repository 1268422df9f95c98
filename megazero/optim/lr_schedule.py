"""Learning rate as a function of what came before a step.

A run counts in samples as soon as one of its lengths is given in samples, else in iterations; the count of a step is
what was consumed (or done) before it. So the first step of a run that warms up has rate 0, as BLOOM's had.
Formulas are Megatron-LM's; `wsd` is warm-up, constant, and a linear fall over the last part.
"""

from __future__ import annotations

import math

from megazero.config.schema import ScheduleConfig
from megazero.optim.batch_schedule import BatchSchedule

WSD_SHARE = 0.1
"""Share of the decay's length that the falling part of wsd has where none is given."""


class LearningRate:
    """`at(iterations, consumed)` is the rate of the step before which so many iterations were done and samples
    consumed.

    Lengths in iterations are turned into the samples that the run's first so many iterations consume where the run
    counts in samples. Raises ValueError for a decaying style in a run without any length.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self.config, self.batches = config, BatchSchedule(config)
        self.counts_samples = any(
            value is not None
            for value in (
                config.lr_warmup_samples,
                config.lr_decay_samples,
                config.lr_wsd_decay_samples,
                config.train_samples,
            )
        )
        decay = self._length(config.lr_decay_iters, config.lr_decay_samples)
        run = self._length(config.train_iters, config.train_samples)
        self.decay = run if decay is None else decay
        warmup = self._length(config.lr_warmup_iters, config.lr_warmup_samples)
        if config.lr_warmup_fraction is not None:
            if self.decay is None:
                raise ValueError(
                    "--lr-warmup-fraction is a share of --lr-decay-iters, --lr-decay-samples or the run's length: give "
                    "one"
                )
            warmup = config.lr_warmup_fraction * self.decay
        self.warmup = 0 if warmup is None else warmup
        if self.decay is None and config.lr_decay_style != "constant":
            raise ValueError(
                f"--lr-decay-style {config.lr_decay_style} needs --train-iters, --train-samples or a length of its own"
            )
        fall = self._length(config.lr_wsd_decay_iters, config.lr_wsd_decay_samples)
        self.fall = WSD_SHARE * (self.decay or 0) if fall is None else fall

    def _length(self, iterations: int | None, samples: int | None) -> float | None:
        if iterations is None or samples is not None:
            return samples
        return self.batches.consumed_after(iterations) if self.counts_samples else iterations

    def at(self, iterations: int, consumed: int) -> float:
        """The rate of the step that follows `iterations` iterations and `consumed` samples."""
        return self._rate(consumed if self.counts_samples else iterations)

    def _rate(self, count: int) -> float:
        highest, lowest, style = self.config.lr, self.config.min_lr, self.config.lr_decay_style
        if self.warmup > 0 and count <= self.warmup:
            return highest * count / self.warmup
        if style == "constant":
            return highest
        assert self.decay is not None
        if count > self.decay:
            return lowest
        if style == "inverse-square-root":
            return max(lowest, highest * math.sqrt(max(self.warmup, 1) / max(count, 1)))
        return lowest + self._share(style, count) * (highest - lowest)

    def _share(self, style: str, count: int) -> float:
        """Where between lowest (0) and highest (1) the rate is."""
        assert self.decay is not None
        if style == "wsd":
            return 1.0 if count <= self.decay - self.fall else (self.decay - count) / self.fall
        ratio = (count - self.warmup) / (self.decay - self.warmup)
        return 1.0 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
