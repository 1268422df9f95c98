"""What backward computes again, as a table by block that --recompute-granularity and --recompute-num-layers fill."""

from __future__ import annotations

from megazero.config.schema import Run

NONE, SELECTIVE, FULL = RECOMPUTE = ("none", "selective", "full")
"""What is computed again of one block: nothing, the attention core, or the whole block."""

RecomputeTable = tuple[str, ...]
"""A word of `RECOMPUTE` for every block of the model, by its global number."""


def every_kth(layers: int, kind: str, every: int = 1) -> RecomputeTable:
    """The table of `layers` blocks in which backward computes `kind` again.

    every: with "full", only blocks whose number is a multiple of it; the others keep their activations. Raises
    ValueError for an unknown kind, and for `every` below 1.
    """
    if kind not in RECOMPUTE:
        raise ValueError(f"--recompute-granularity {kind}: choose {', '.join(RECOMPUTE)}")
    if every < 1:
        raise ValueError(f"--recompute-num-layers {every} is less than 1")
    return tuple(kind if kind != FULL or number % every == 0 else NONE for number in range(layers))


def recompute_by_flags(run: Run) -> RecomputeTable:
    """The table that the run's flags fill."""
    p = run.parallel
    return every_kth(run.model.num_layers, p.recompute_granularity, p.recompute_num_layers)
