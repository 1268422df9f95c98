"""Made-up ranks: units and buckets without a model, and lists as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megazero.program.instruction import Instruction, Kind
from megazero.program.shape import BucketShape, RankShape, UnitShape


def shape(*chunks: Sequence[Sequence[int]], **every: object) -> RankShape:
    """A rank with these buckets by chunk and unit; a bucket belongs to the first chunk that names it.

    every: further fields of all buckets.
    """
    holder: dict[int, int] = {}
    for number, units in enumerate(chunks):
        for bucket in (bucket for unit in units for bucket in unit):
            holder.setdefault(bucket, number)
    buckets = tuple(BucketShape(holder[number], 8, 16, **every) for number in sorted(holder))  # type: ignore[arg-type]
    made = tuple(tuple(UnitShape(*(tuple(unit),) * 3) for unit in units) for units in chunks)
    return RankShape(made, buckets)


def texts(instructions: Iterable[Instruction]) -> list[str]:
    """What a list prints."""
    return [str(i) for i in instructions]


def lettered(instructions: Iterable[Instruction], letters: Mapping[Kind, str]) -> str:
    """What is done to which bucket, and its part; of a computation its unit. Others are left out."""
    found = []
    for i in instructions:
        if i.op in letters:
            where = "".join(map(str, i.buckets or (i.units or ())[:1])) + (f".{i.part}" if i.part >= 0 else "")
            found.append(letters[i.op] + where)
    return " ".join(found)
