"""Lengths of a learning-rate schedule, for tests that make its configuration."""

from __future__ import annotations

from megazero.config.lengths import Length, Measure


def iterations(number: int) -> Length:
    return Length(number, Measure.ITERATIONS)


def samples(number: int) -> Length:
    return Length(number, Measure.SAMPLES)


def share(number: float) -> Length:
    return Length(number, Measure.SHARE)
