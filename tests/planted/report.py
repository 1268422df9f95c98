"""What the program prints: a line for each fault as it is judged, and a table by area at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.planted.fault import Fault
from tests.planted.plant import Judge, Verdict

MAY_BE_MISSED = 0.02
"""The share of the faults that may be missed: 98 of 100 are to be caught."""


class Judged(NamedTuple):
    """A fault that was planted, and what was said of it."""

    fault: Fault
    verdict: Verdict


def line_of(one: Judged) -> str:
    """A fault, what has caught it, and its processor time."""
    fault, verdict = one
    row = "" if fault.number is None else f"{fault.number:2}"
    judge = verdict.judge.value if verdict.judge is not None else "MISSED"
    return f"{row:2} {fault.area:10} {fault.name:42} {judge:7} {verdict.seconds:5.1f} s  {fault.test}"


def table_of(judged: Sequence[Judged]) -> str:
    """For each area the number of faults, of those that were caught, by each judge, and the processor time."""
    heads = ("area", "faults", "caught", *(f"by {judge.value}" for judge in Judge), "seconds")
    areas = sorted({one.fault.area for one in judged})
    rows = [(area, [one for one in judged if one.fault.area == area]) for area in areas]
    cells = [_cells(area, inside) for area, inside in (*rows, ("all", judged))]
    return "\n".join(f"{first:12}" + "".join(f"{cell:>12}" for cell in rest) for first, *rest in (heads, *cells))


def _cells(area: str, judged: Sequence[Judged]) -> tuple[str, ...]:
    judges = [one.verdict.judge for one in judged]
    caught = len(judges) - judges.count(None)
    seconds = sum(one.verdict.seconds for one in judged)
    numbers = (len(judges), caught, *(judges.count(judge) for judge in Judge))
    return area, *map(str, numbers), f"{seconds:.0f}"


def words_of(judged: Sequence[Judged]) -> str:
    """How many of the faults are caught, and which are not."""
    missed = [one.fault.name for one in judged if one.verdict.judge is None]
    threads = len({one.fault.thread for one in judged} - {""})
    rows = len({one.fault.number for one in judged} - {None})
    said = f"{len(judged) - len(missed)} of {len(judged)} faults caught; {rows} rows of the list, {threads} threads"
    return f"{said}; missed: {', '.join(missed)}" if missed else said


def suffices(judged: Sequence[Judged]) -> bool:
    """Whether so many are caught as have to be: all but a fiftieth."""
    missed = sum(one.verdict.judge is None for one in judged)
    return missed <= MAY_BE_MISSED * len(judged)
