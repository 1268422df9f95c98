"""Batch sizes, lengths and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config import extensions
from megazero.config.fields import option

_RUN_LENGTH = "the length of the run"


@dataclass(frozen=True)
class ScheduleConfig:
    """Batch sizes, lengths and the learning rate. Lengths are all in iterations or all in samples."""

    micro_batch_size: int = option(2, common=True)
    "Samples in one forward pass of one rank."
    global_batch_size: int = option(24, common=True, derived="24, rounded up")
    "Samples in one optimizer step over all ranks. It is a multiple of micro-batch x dp."
    rampup_batch_size: tuple[int, ...] | None = option(None, many=True, metavar="N", derived="no ramp")
    "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over SAMPLES samples."
    train_iters: int | None = option(None, common=True, derived="100, or fewer in 10 minutes")
    "Number of optimizer steps."
    train_samples: int | None = option(None, derived="--train-iters counts")
    "Number of samples to train on instead of iterations, in whole global batches."
    epochs: float | None = option(None, metavar="X", derived="--train-iters counts", common=True)
    """Number of passes over the training data, instead of iterations. For a blend one epoch is as many tokens as all
    its
    parts have together, and the banner says how often each part is read."""
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
    lr_warmup_iters: int | None = option(None, common=True, derived="no warm-up")
    "Length of the linear warm-up in iterations."
    lr_warmup_samples: int | None = option(None, derived="no warm-up")
    "Length of the linear warm-up in samples."
    lr_warmup_fraction: float | None = option(None, derived="no warm-up")
    "Length of the linear warm-up as a fraction of the decay's."
    lr_decay_iters: int | None = option(None, derived=_RUN_LENGTH)
    "Length of warm-up and decay in iterations."
    lr_decay_samples: int | None = option(None, derived=_RUN_LENGTH)
    "Length of warm-up and decay in samples."
    lr_wsd_decay_iters: int | None = option(None, derived="a tenth of the decay's length", expert=True)
    "wsd: length of the falling part in iterations."
    lr_wsd_decay_samples: int | None = option(None, derived="a tenth of the decay's length", expert=True)
    "wsd: length of the falling part in samples."
