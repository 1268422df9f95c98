"""What `bench.calibrated_plan` and `bench.card_plan` share, which show predicted beside measured seconds and memory of
steps: the entry of `--calibrate`, flags, and the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import results
from bench.script import parser_of, say
from megazero.system.threads import VARIABLE

ENTRY = "here"
"""The name of the entry in a file of this machine."""


def steps_parser(doc: str | None, quick: str) -> ArgumentParser:
    """`bench.script.parser_of` with the flags of `entry_file` and `earlier`."""
    parser = parser_of(doc, quick)
    parser.add_argument("--hardware", type=Path, metavar="FILE.yaml", help="a calibrated entry; default: one is made")
    parser.add_argument("--measured", type=Path, metavar="FILE.json", help="runs and entry of an earlier call")
    return parser


def leave_threads_to_ranks() -> None:
    """All that this program starts has the threads of a user who has not set them."""
    os.environ.pop(VARIABLE, None)


def earlier(args: Namespace) -> dict[str, Any]:
    """What an earlier call has written; {} without --measured."""
    kept: dict[str, Any] = {} if args.measured is None else json.loads(args.measured.read_text())
    return kept


def entry_file(args: Namespace, folder: Path, words: Sequence[str]) -> Path:
    """The file with the entry of this machine: given, of an earlier call, or made now. words: more flags for that."""
    if args.hardware is not None:
        return Path(args.hardware)
    target, began = folder / "here.yaml", time.perf_counter()
    if kept := earlier(args):
        target.write_text(kept["hardware"])
        return target
    command = [sys.executable, "-m", "megazero", "plan", "--calibrate", str(target), "--gpu", ENTRY, *words]
    subprocess.run(command, check=True)
    say(f"calibrated in {time.perf_counter() - began:.0f} s")
    return target


@dataclass(frozen=True)
class ComparedStep:
    """A step's numbers, (seconds, bytes of the fullest rank), as measured and as predicted. words: the cells of a table
    that say which step it is.
    """

    words: tuple[str, ...]
    measured: tuple[float, float]
    predicted: tuple[float, float]

    @property
    def off(self) -> tuple[float, float]:
        """Predicted over measured, minus 1: of seconds and of memory."""
        return self.predicted[0] / self.measured[0] - 1, self.predicted[1] / self.measured[1] - 1


@dataclass(frozen=True)
class StepTable:
    """How steps are shown.

    heads   of `ComparedStep.words`
    unit    of memory, and its bytes
    digits  of milliseconds and of memory, behind the point
    aims    what predictions of time and of memory may be off by
    """

    heads: tuple[str, ...]
    unit: tuple[str, float]
    digits: tuple[int, int]
    aims: tuple[float, float]

    def text(self, rows: Sequence[ComparedStep]) -> str:
        """The table, and how far off the predictions are."""
        heads = [*self.heads, "ms", "predicted", "off", self.unit[0], "predicted", "off"]
        return f"{results.table(heads, [self._cells(row) for row in rows])}\n\n{self._verdict(rows)}"

    def is_met(self, row: ComparedStep) -> bool:
        return all(abs(off) <= aim for off, aim in zip(row.off, self.aims, strict=True))

    def _cells(self, row: ComparedStep) -> list[str]:
        cells, units = [*row.words], (1e-3, self.unit[1])
        for measured, predicted, off, unit, digits in zip(
            row.measured, row.predicted, row.off, units, self.digits, strict=True
        ):
            cells += [f"{measured / unit:,.{digits}f}", f"{predicted / unit:,.{digits}f}", f"{off:+.1%}"]
        return cells

    def _verdict(self, rows: Sequence[ComparedStep]) -> str:
        words = list[str]()
        for at, (what, aim) in enumerate(zip(("time", "memory"), self.aims, strict=True)):
            off = [abs(row.off[at]) for row in rows]
            met, mean = sum(each <= aim for each in off), sum(off) / len(off)
            near = f"{what}: {met} of {len(off)} layouts within {aim:.0%}"
            words.append(f"{near}, {mean:.1%} in the mean, {max(off):.1%} at most")
        return "; ".join(words)
