"""Megatron's blend of datasets: step i takes the dataset that is furthest behind its weight.

The rule is greedy (float64, `w[k] * max(i, 1) - taken[k]`, lowest index on ties), so step i depends on all steps before
it. A loop in Python would take minutes for a long run. Instead the steps are divided into lanes that numpy computes in
parallel. Each lane starts from a guess of `taken`. If the lane before it ends with another value, it is run again from
that value. Small differences vanish within a few rounds, so one or two repeats suffice. The result is exactly that of
the loop: a lane is kept only if it started from the value with which its predecessor ended.
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


def normalise_weights(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights divided by their sum, float64 [datasets]. Raises DataError unless all are finite and larger than 0."""
    values = np.array(weights, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all() or (values <= 0).any():
        raise DataError(f"--data-path: weights must be finite and larger than 0, got {', '.join(map(str, weights))}")
    if len(values) > MOST_DATASETS:
        raise DataError(f"--data-path: a blend of {len(values)} datasets; the most is {MOST_DATASETS}")
    return values / np.sum(values)


def planned_samples(shares: NDArray[np.float64], size: int) -> list[int]:
    """Number of samples that a blend of `size` takes of each dataset, rounded up. Their sum is the blend's length."""
    return [math.ceil(size * share) for share in shares.tolist()]


def samples_to_build(shares: NDArray[np.float64], size: int) -> list[int]:
    """Number of samples for which each dataset is built: 0.5 % more than `planned_samples`."""
    return [math.ceil(count * 1.005) for count in planned_samples(shares, size)]


def blend_index(shares: NDArray[np.float64], size: int) -> dict[str, NDArray]:
    """dataset_index int16 [size] and dataset_sample_index int64 [size]: the dataset of step i, and its item there."""
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
    """Fill the outputs [lanes, steps] of steps first, first+1, ...

    taken: float64 [datasets] before them. Returns the same after them.
    """
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
    """A guess of `taken` before each of these steps, by largest remainder: float64 [len(steps), datasets]."""
    exact = shares * steps[:, None].astype(np.float64)
    taken = np.floor(exact)
    left = steps - taken.sum(axis=1).astype(np.int64)
    rank = np.argsort(np.argsort(taken - exact, axis=1, kind="stable"), axis=1)
    return taken + (rank < left[:, None])


def _advance(
    shares: NDArray[np.float64], starts: NDArray[np.int64], before: NDArray[np.float64], steps: int
) -> tuple[NDArray[np.float64], NDArray[np.int16], NDArray[np.int64]]:
    """Run lanes in parallel: (`taken` after them [lanes, datasets], dataset [lanes, steps], item [lanes, steps])."""
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
