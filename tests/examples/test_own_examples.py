"""Examples of models of one's own: each learns its task alone, and the same on ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.examples.own_programs import ACCURACY, HELD_OUT, LOSS, numbers, told_on

BOUNDS = {"vision": ("60", 0.6), "translation": ("100", 0.2), "head": ("60", 0.65)}
"""Steps, and an accuracy far above that of guesses: a quarter, one in 3999, and a half."""

SETTINGS = {"vision": '{"pp": 2}', "translation": '{"pp": 2}', "head": '{"zero_stage": 3}'}
"""Of two ranks."""


@cache
def told(name: str, ranks: int, settings: str = "{}") -> str:
    if name == "head":
        pytest.importorskip("transformers")
    with TemporaryDirectory() as folder:
        flags = ["--steps", BOUNDS[name][0], "--settings", settings]
        first = told_on(ranks, f"own_{name}.py", flags, Path(folder))
        Path(folder, f"own-{name}.safetensors").unlink()
        again = told_on(1, f"own_{name}.py", flags[:2], Path(folder))  # from the checkpoint: no step is left
        assert not numbers(LOSS, again)
        assert numbers(HELD_OUT, again) == pytest.approx(numbers(HELD_OUT, first), rel=1e-2)
        return first


@pytest.mark.parametrize("name", BOUNDS)
def test_it_learns_alone(name: str) -> None:
    assert numbers(ACCURACY, told(name, 1))[0] > BOUNDS[name][1]


@pytest.mark.parametrize("name", BOUNDS)
def test_ranks_learn_the_same(name: str) -> None:
    on_ranks = told(name, 2, SETTINGS[name])
    assert numbers(LOSS, on_ranks) == pytest.approx(numbers(LOSS, told(name, 1)), rel=0.02)
    assert numbers(HELD_OUT, on_ranks) == pytest.approx(numbers(HELD_OUT, told(name, 1)), rel=0.02)
    assert numbers(ACCURACY, on_ranks) == pytest.approx(numbers(ACCURACY, told(name, 1)), abs=0.02)
