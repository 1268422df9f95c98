"""Megatron's blend of datasets: step i takes the dataset that is furthest behind its share.

The rule is greedy (float64, `w[k] * max(i, 1) - taken[k]`, lowest index on ties), so step i needs all steps before it.
A loop in Python would take minutes for a long run. Instead the steps are cut into lanes that advance side by side in
numpy: each lane starts from a good guess of `taken`, and where the lane before it ends elsewhere, it is run again from
there. The rule forgets small differences within a few rounds, so one or two repeats suffice; the result is that of the
loop whatever the guesses were, because a lane is kept only if it started from exactly what its predecessor ended with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megazero.data.indexed import DataError

LANES = 2048
FEWEST = 64
MOST_DATASETS = 32767


def normalise(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights divided by their sum. Raises DataError unless all are finite and larger than 0."""
    values = np.array(weights, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all() or (values <= 0).any():
        raise DataError(f"--data-path: weights must be finite and larger than 0, got {', '.join(map(str, weights))}")
    if len(values) > MOST_DATASETS:
        raise DataError(f"--data-path: a blend of {len(values)} datasets; the most is {MOST_DATASETS}")
    return values / np.sum(values)


def wanted(shares: NDArray[np.float64], size: int) -> list[int]:
    """Samples each dataset is planned to give; their sum is the blend's length."""
    return [math.ceil(size * share) for share in shares.tolist()]


def built(shares: NDArray[np.float64], size: int) -> list[int]:
    """Samples each dataset is built for: half a percent more."""
    return [math.ceil(count * 1.005) for count in wanted(shares, size)]


def blend_index(shares: NDArray[np.float64], size: int) -> dict[str, NDArray]:
    """dataset_index int16 [size] and dataset_sample_index int64 [size]: which dataset step i takes, and which of its
    items.
    """
    shares = shares / np.sum(shares)
    dataset, item = np.zeros(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    if len(shares) == 1:
        item[:] = np.arange(size)
        return {"dataset_index": dataset, "dataset_sample_index": item}
    taken = np.zeros(len(shares), dtype=np.float64)
    done = 0
    while done < size:
        side = min(LANES, math.isqrt(size - done))
        lanes, steps = (side, side) if side >= FEWEST else (1, size - done)
        stop = done + lanes * steps
        taken = _block(
            shares, done, taken, dataset[done:stop].reshape(lanes, steps), item[done:stop].reshape(lanes, steps)
        )
        done = stop
    return {"dataset_index": dataset, "dataset_sample_index": item}


def _block(
    shares: NDArray[np.float64],
    first: int,
    taken: NDArray[np.float64],
    dataset: NDArray[np.int16],
    item: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Fill [lanes, steps] outputs of steps first, first+1, ...; `taken` before them in, after them out."""
    lanes, steps = dataset.shape
    starts = first + np.arange(lanes, dtype=np.int64) * steps
    before = np.vstack([taken, *([_guess(shares, starts[1:])] if lanes > 1 else [])])
    after = np.empty_like(before)
    again = np.arange(lanes)
    while len(again):
        after[again], dataset[again], item[again] = _advance(shares, starts[again], before[again], steps)
        again = 1 + np.flatnonzero((before[1:] != after[:-1]).any(axis=1))
        before[again] = after[again - 1]
    return after[-1]


def _guess(shares: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Likely `taken` before each of these steps: shares rounded by largest remainder. [len(steps), datasets]."""
    exact = shares * steps[:, None].astype(np.float64)
    taken = np.floor(exact)
    left = steps - taken.sum(axis=1).astype(np.int64)
    rank = np.argsort(np.argsort(taken - exact, axis=1, kind="stable"), axis=1)
    return taken + (rank < left[:, None])


def _advance(
    shares: NDArray[np.float64], starts: NDArray[np.int64], before: NDArray[np.float64], steps: int
) -> tuple[NDArray[np.float64], NDArray[np.int16], NDArray[np.int64]]:
    """Run lanes side by side: `taken` after, dataset [lanes, steps] and item [lanes, steps]."""
    taken = before.copy()
    rows = np.arange(len(starts))
    behind = np.empty_like(taken)
    dataset, item = np.empty((steps, len(starts)), dtype=np.int16), np.empty((steps, len(starts)), dtype=np.int64)
    for step in range(steps):
        number = np.maximum(starts + step, 1).astype(np.float64)
        np.multiply(shares, number[:, None], out=behind)
        behind -= taken
        chosen = behind.argmax(axis=1)
        dataset[step] = chosen
        item[step] = taken[rows, chosen]
        taken[rows, chosen] += 1.0
    return taken, dataset.T, item.T
