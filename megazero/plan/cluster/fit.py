"""The fit of constants to measured seconds: the least weighted mean absolute logarithm of predicted over measured.

A prediction that is twice too long counts as much as one that takes half, and one odd measurement does not outweigh
all others, as it would in a sum of squares.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SMALL = 0.01
"""Errors below this count as this large when they are weighed."""
STEP = 1e-3
"""Of the range of a constant: the change by which its effect is found."""
LEAST_DAMPING = 1e-6
"""Below it constants that only count together would leave no single change to make."""


def fitted(
    errors_of: Callable[[Floats], Floats],
    start: Floats,
    bounds: tuple[Floats, Floats],
    weights: Floats,
    rounds: int = 25,
) -> Floats:
    """The constants within bounds whose weighted absolute errors have the least sum, from a start.

    errors_of: from constants [n] to errors [m], which are logarithms. bounds: the least and the most of each constant.
    (Levenberg-Marquardt on reweighted squares: residuals weigh 1/|residual|, so that a square is an absolute value.)
    """
    low, high = bounds
    values, damping = start, 1e-2
    errors = errors_of(values)
    for _ in range(rounds):
        square = weights / np.maximum(np.abs(errors), SMALL)
        step = STEP * (high - low)
        columns = [
            (errors_of(values + step * (index == np.arange(len(values)))) - errors) / step[index]
            for index in range(len(values))
        ]
        slope = np.stack(columns, 1) * (high - low)
        normal, side = slope.T @ (square[:, None] * slope), slope.T @ (square * errors)
        for _ in range(8):
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), side)
            tried = np.clip(values - change * (high - low), low, high)
            better = errors_of(tried)
            if (weights * np.abs(better)).sum() < (weights * np.abs(errors)).sum():
                values, errors, damping = tried, better, max(damping / 3, LEAST_DAMPING)
                break
            damping *= 4
        else:
            break
    return values
