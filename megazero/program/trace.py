"""The memory of a step at every instruction, as JSON and as a picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.program.effects import Scope
from megazero.program.instruction import Instruction
from megazero.program.memory import MemoryColumn, Place, Sample, samples
from megazero.program.memory_picture import html, svg
from megazero.program.shape import RankShape
from megazero.program.step_bytes import StepBytes

PICTURES = {".svg": svg, ".html": html}
SUFFIXES = (".json", *PICTURES)


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of one rank's step.

    rank     whose it is, in words
    shape    its model state
    samples  at every instruction
    """

    rank: str
    shape: RankShape
    samples: tuple[Sample, ...]

    @property
    def peak(self) -> Sample:
        """The first instruction at which most bytes are alive."""
        return max(self.samples, key=lambda sample: sample.total)


def trace(rank: str, instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes) -> MemoryTrace:
    """The memory of a rank that runs this list."""
    return MemoryTrace(rank, scope.shape, tuple(samples(instructions, scope, sizes)))


def write(found: MemoryTrace, path: Path) -> tuple[Path, ...]:
    """Write a trace as JSON, or as a picture with the JSON beside it; returns the paths.

    path: its suffix is one of `SUFFIXES`. Raises ValueError for another, OSError where it cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} does not end in {', '.join(SUFFIXES)}")
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")
    if path == beside:
        return (path,)
    path.write_text(PICTURES[path.suffix](found.rank, found.samples, found.peak), encoding="utf-8")
    return path, beside


def as_json(found: MemoryTrace) -> dict[str, Any]:
    """The trace as plain values. Sizes are in bytes; what is 0 is left out.

    micro_batches  by micro-batch: activations and hidden states
    units          by unit: activations, and what there is of its buckets. A bucket counts for the first unit that
                   reads it
    """
    readers = _readers(found.shape)
    return {
        "rank": found.rank,
        "columns": [column.value for column in MemoryColumn],
        "peak": _described(found.peak, readers),
        "instructions": [_described(sample, readers) for sample in found.samples],
    }


def _described(sample: Sample, readers: Mapping[int, str]) -> dict[str, Any]:
    return {
        "number": sample.number,
        "instruction": str(sample.instruction),
        "bytes": sample.total,
        "columns": {column.value: size for column, size in sample.columns.items()},
        "micro_batches": _summed((str(p.micro_batch), n) for p, n in sample.places.items() if p.micro_batch >= 0),
        "units": _summed((_unit(p, readers), n) for p, n in sample.places.items()),
    }


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, size in pairs:
        if name:
            found[name] += size
    return dict(sorted(found.items()))


def _unit(place: Place, readers: Mapping[int, str]) -> str:
    """The unit to which an allocation belongs; an empty word for what belongs to none."""
    if place.bucket >= 0:
        return readers.get(place.bucket, "")
    return f"chunk {place.chunk}, unit {place.unit}" if place.column is MemoryColumn.ACTIVATIONS else ""


def _readers(shape: RankShape) -> dict[int, str]:
    """Of every bucket the first unit that reads it."""
    found: dict[int, str] = {}
    for chunk, units in enumerate(shape.units):
        for number, unit in enumerate(units):
            for bucket in unit.forward:
                found.setdefault(bucket, f"chunk {chunk}, unit {number}")
    return found
