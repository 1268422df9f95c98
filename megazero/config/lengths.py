"""What a run's length says about it that its user may not have thought of."""

from __future__ import annotations

from megazero.config.schema import Run

LONG = 500
"""Iterations after which losing all of them hurts, whatever a step takes."""


def iterations_of(run: Run) -> int | None:
    """Iterations of a run; with samples and a growing batch those that the full batch would need, which are fewer.

    None: its data will say.
    """
    schedule = run.schedule
    if schedule.train_iters is not None:
        return schedule.train_iters
    return None if schedule.train_samples is None else schedule.train_samples // schedule.global_batch_size


def rarely_saved(run: Run) -> list[str]:
    """A long run that keeps nothing, or keeps only its end."""
    iterations, save = iterations_of(run), run.checkpoint
    if iterations is None or iterations <= LONG or save.save_interval is not None:
        return []
    if save.save is None:
        return [f"nothing of these {iterations:,} iterations is kept: there is no --save DIR"]
    return [
        f"--save without --save-interval: should these {iterations:,} iterations fail before their end, nothing of "
        "them is kept"
    ]
