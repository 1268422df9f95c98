"""Every flag takes part in a proof, or is made small, or the proof says why it takes no part."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megazero.config.options import run_options
from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.verify.left_out import LEFT_OUT, MADE_SMALL
from megazero.verify.shrink import shrunk
from tests.effects.rows import ROWS, Row

NAMED = {name for row in LEFT_OUT for name in row.names.split()}
RANKS = 2
WAYS_OF_NCCL = "--backend nccl"
"""Takes part: with it the small run takes these ways (`proof.takes_nccl`), on threads."""


def test_a_setting_is_named_once() -> None:
    assert not NAMED & MADE_SMALL and run_options().keys() >= NAMED | MADE_SMALL
    assert len(NAMED) == sum(len(row.names.split()) for row in LEFT_OUT)


@cache
def base() -> Run:
    return parse_run(
        "--vocab-size 1003 --num-attention-heads 4 --hidden-size 32 --precision fp64 --train-iters 4".split(), RANKS
    )


def settings_of(words: str) -> Mapping[str, Any]:
    """Fields and values of flags, which nothing checks: some need a card, or a checkpoint."""
    made: dict[str, Any] = {}
    for part in (" " + words).split(" --")[1:]:
        name, *values = shlex.split(part)
        flag = f"--{name}"
        option = next(known for known in run_options().values() if flag in (*known.flags, *known.negations))
        if option.kind is bool:
            made[option.name] = flag not in option.negations
        elif option.choices == ():  # names that installed packages add
            made[option.name] = tuple(values)
        else:
            made[option.name] = option.from_words(values, option.measure_of(name))
    return made


def run_of(settings: Mapping[str, Any]) -> Run:
    run = base()
    for name, value in settings.items():
        section = run_options()[name].section
        run = replace(run, **{section: replace(getattr(run, section), **{name: value})})
    return run


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.field}-{row.words}")
def test_a_flag_takes_part_or_is_named(row: Row) -> None:
    """Of a field that is neither in the table nor made small, the small run has the value of the run."""
    run = run_of(settings_of(row.words))
    option, made = run_options()[row.field], shrunk(run, RANKS)
    named = {flag.split()[0] for note in made.notes for flag in note.partition(":")[0].split(", ")}
    flags = {*option.flags, *option.negations}
    if row.field in NAMED:
        takes_part = option.value_in(run) in (option.default, option.value_in(made.run)) or row.words == WAYS_OF_NCCL
        assert flags & named or takes_part, made.notes
    else:
        assert not flags & named
        assert row.field in MADE_SMALL or option.value_in(made.run) == option.value_in(run)
