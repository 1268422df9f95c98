"""Warnings of a long run that hardly saves, and of a learning rate with which hardly any model learns."""

from __future__ import annotations

from megazero.config.schema import Run

LONG = 500
"""Runs of more iterations than this get a warning if they do not save."""


def iterations_of(run: Run) -> int | None:
    """Iterations of a run; None if they follow from its data (--epochs).

    For --train-samples they are counted with the full global batch. With a ramp the run has more.
    """
    schedule = run.schedule
    if schedule.train_iters is not None:
        return schedule.train_iters
    return None if schedule.train_samples is None else schedule.train_samples // schedule.global_batch_size


def rarely_saved(run: Run) -> list[str]:
    """A sentence for a long run that saves nothing, or saves only at its end."""
    iterations, save = iterations_of(run), run.checkpoint
    if iterations is None or iterations <= LONG or save.save_interval is not None:
        return []
    if save.save is None:
        return [f"nothing of these {iterations:,} iterations is kept: there is no --save DIR"]
    return [
        f"--save without --save-interval: should these {iterations:,} iterations fail before their end, nothing of "
        "them is kept"
    ]


LARGEST_USUAL_RATE = 0.1
"""Adam moves a weight by about the learning rate in a step, and weights begin at about 0.02."""


def unusual_rates(run: Run) -> list[str]:
    """A sentence for a learning rate with which hardly any model learns."""
    rate = run.schedule.lr
    if rate == 0:
        return ["--lr 0: no weight changes"]
    if rate > LARGEST_USUAL_RATE:
        return [f"--lr {rate:g}: Adam moves each weight by about that much in a step; usual are 1e-5 to 1e-2"]
    return []
