"""Batch sizes, lengths and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import Section, option
from megazero.config.lengths import Length, Measure
from megazero.system import extensions

_COUNTS = (Measure.ITERATIONS, Measure.SAMPLES)
_OF_A_RUN = (*_COUNTS, Measure.EPOCHS)
_OF_A_RATE = (*_COUNTS, Measure.SHARE)


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """Batch sizes, the learning rate, and lengths: all in iterations or all in samples, or epochs and a share."""

    # Each of a length's `measures` is a flag and a key, too (`config.options.measured_keys`): --lr-warmup-iters, ...

    micro_batch_size: int = option(2, common=True)
    "Samples in one forward pass of one rank."
    global_batch_size: int = option(24, common=True, derived="24, rounded up")
    "Samples in one optimizer step over all ranks. It is a multiple of micro-batch x dp."
    rampup_batch_size: tuple[int, ...] | None = option(None, many=True, metavar="N", derived="no ramp")
    "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over SAMPLES samples."
    train_length: Length | None = option(
        None,
        measures=_OF_A_RUN,
        metavar="LENGTH",
        common=True,
        derived="100 iterations, or fewer in 10 minutes",
    )
    """Length of the run: N iterations (optimizer steps), N samples in whole global batches, or X epochs (passes over
    the training data). An epoch of a blend has as many tokens as all its parts together, and the banner says how often
    each part is read."""
    lr: float = option(1e-3, common=True)
    "Peak learning rate."
    min_lr: float = option(0.0)
    "Learning rate at the end of the decay."
    lr_decay_style: str = option(
        "cosine",
        choices=("constant", "linear", "cosine", "inverse-square-root", "wsd"),
        extended_by=extensions.LR_DECAY_STYLES,
    )
    "Shape of the decay. wsd stays constant after the warm-up and then falls linearly. Packages may add shapes."
    lr_warmup: Length | None = option(None, measures=_OF_A_RATE, metavar="LENGTH", common=True, derived="none")
    "Linear warm-up: N iterations, N samples, or X% of the decay."
    lr_decay: Length | None = option(None, measures=_COUNTS, metavar="LENGTH", derived="the length of the run")
    "Warm-up and decay together: N iterations, or N samples."
    lr_wsd_decay: Length | None = option(
        None,
        measures=_COUNTS,
        metavar="LENGTH",
        derived="a tenth of the decay's length",
        expert=True,
        needs="--lr-decay-style wsd",
    )
    "wsd: the falling part, of N iterations or N samples."

    @property
    def train_iters(self) -> int | None:
        """Number of optimizer steps; None where the run's length is not given in iterations."""
        return self._count(Measure.ITERATIONS)

    @property
    def train_samples(self) -> int | None:
        """Number of samples to train on; None where the run's length is not given in samples."""
        return self._count(Measure.SAMPLES)

    @property
    def epochs(self) -> float | None:
        """Number of passes over the training data; None where the run's length is not given in epochs."""
        length = self.train_length
        return length.number if length is not None and length.measure is Measure.EPOCHS else None

    def _count(self, measure: Measure) -> int | None:
        length = self.train_length
        return int(length.number) if length is not None and length.measure is measure else None
