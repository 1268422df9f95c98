"""The memory of a step at every instruction, on a rank of every stage, as JSON and as pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.config.schema.trainer import TRACE_SUFFIXES
from megazero.program.instruction import Instruction
from megazero.program.memory import MemoryColumn, Sample, UnitKey
from megazero.program.memory_picture import html, svg
from megazero.program.memory_walk import peak, samples, spare_buffers
from megazero.program.scope import Scope
from megazero.program.step_bytes import StepBytes
from megazero.program.timed_step import TimedStep
from megazero.system.writable import why_not_replaced

KIND = "megazero memory trace"
"""Stands in the first line of every file of a trace: such a file may be written again."""
_HEAD = 512
"""Bytes in which `KIND` is looked for."""


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of one rank's step.

    rank     whose it is, in words
    samples  at every instruction
    peak     the first instruction at which most bytes are alive, with every allocation
    units    the names of its units
    timed    the same step in time, where rates are known: a page shows it too
    """

    rank: str
    samples: Sequence[Sample]
    peak: Sample
    units: Mapping[UnitKey, str]
    timed: TimedStep | None = None


def trace(
    rank: str, instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes, units: Mapping[UnitKey, str]
) -> MemoryTrace:
    """The memory of a rank that runs this list, not for the first time. units: the names of its units."""
    of = instructions, scope, sizes, spare_buffers(instructions, scope, sizes)
    return MemoryTrace(rank, tuple(samples(*of)), peak(*of), dict(units))


def files_of(path: Path) -> tuple[Path, ...]:
    """The files of a trace: a picture and the JSON beside it, or the JSON alone."""
    beside = path.with_suffix(".json")
    return (path,) if path == beside else (path, beside)


def why_not_a_trace(path: Path) -> str | None:
    """Why a trace may not be written to this path, as `system.writable.why_not_replaced` says it."""
    return why_not_replaced(path, KIND, _HEAD, "memory trace")


def write(found: Sequence[MemoryTrace], path: Path) -> tuple[Path, ...]:
    """Write traces as JSON, or as a picture with the JSON beside it; returns the paths.

    found  those of all stages, that with the largest peak first. The SVG shows this one alone
    path   its suffix is one of `TRACE_SUFFIXES`. Its folder is made if it is missing

    Raises OSError where it cannot be written, and FileExistsError rather than replace a file of another kind.
    """
    assert path.suffix in TRACE_SUFFIXES, path
    files = files_of(path)
    for file in files:
        if (wrong := why_not_a_trace(file)) is not None:
            raise FileExistsError(f"{file}: {wrong}")
    path.parent.mkdir(parents=True, exist_ok=True)
    files[-1].write_text(as_json(found), encoding="utf-8")
    if path.suffix == ".svg":
        path.write_text(svg(found[0], KIND), encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(html(found, KIND), encoding="utf-8")
    return files


def as_json(found: Sequence[MemoryTrace]) -> str:
    """The traces as JSON, a line for each instruction. Sizes are in bytes.

    columns        by column, without those that are 0; their sum without host memory is `bytes`
    micro_batches  by micro-batch, without those that are 0: activations and hidden states
    units          in the order of the rank's "units": activations, and what there is of a unit's buckets. A bucket
                   counts for the first unit that reads it
    """
    ranks = ",\n".join(_rank(each) for each in found)
    return f'{{"kind": "{KIND}",\n"columns": {_text([c.value for c in MemoryColumn])},\n"ranks": [\n{ranks}\n]}}\n'


def _rank(found: MemoryTrace) -> str:
    lines = ",\n".join(_text(_described(sample, found.units)) for sample in found.samples)
    names, peak = _text(list(found.units.values())), _text(_described(found.peak, found.units))
    return f'{{"rank": {_text(found.rank)},\n"units": {names},\n"peak": {peak},\n"instructions": [\n{lines}\n]}}'


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _described(sample: Sample, units: Iterable[UnitKey]) -> dict[str, Any]:
    return {
        "number": sample.number,
        "instruction": str(sample.instruction),
        "bytes": sample.total,
        "columns": {column.value: size for column, size in sample.columns.items()},
        "micro_batches": {str(number): size for number, size in sorted(sample.micro_batches.items())},
        "units": [sample.units.get(unit, 0) for unit in units],
    }
