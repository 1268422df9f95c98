"""What each rank writes of what it holds: everything once, and as much as its neighbours.

ZeRO's cut gives every rank of a dp group an equal range of what that group holds. Parameters that are replicated over
tp come on every tp rank, as the same ranges: laid end to end they are cut into one equal part per tp rank, which cuts
at most tp - 1 fragments in two. Dealing whole fragments was rejected: a learned position table is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from megazero.checkpoint.format import Fragment, Held, columns_of
from megazero.mpu.place import Place

_Held = TypeVar("_Held", bound=Held)


@dataclass(frozen=True)
class Share:
    """`Held`, cut to what one rank writes."""

    place: Place
    start: int
    stop: int


@dataclass(frozen=True)
class Values:
    """A `Fragment` by itself: cut to what one rank writes, a copy of that, or made to be filled or written.

    A column is a tensor, `blocks.Later`, or None where there is none.
    """

    place: Place
    start: int
    stop: int
    weight: Any = None
    exp_avg: Any = None
    exp_avg_sq: Any = None


def _cuts(held: Sequence[_Held], tp_index: int, tp_size: int) -> Iterator[tuple[_Held, int, int]]:
    """(fragment, start, stop) of what the tp rank writes of the fragments that it holds."""
    total = sum(one.stop - one.start for one in held if not one.place.tp_sharded and one.start < one.stop)
    first, last = (total * index // tp_size for index in (tp_index, tp_index + 1))
    offset = 0
    for one in held:
        start, stop = one.start, one.stop
        if start < stop and not one.place.tp_sharded:
            begin, offset = offset, offset + stop - start
            start, stop = start + max(first - begin, 0), stop - max(offset - last, 0)
        if start < stop:
            yield one, start, stop


def shares(held: Sequence[Held], tp_index: int, tp_size: int) -> list[Share]:
    """What a rank writes, by layout arithmetic. held: all that it holds, in the order in which every
    tp rank holds it.
    """
    return [Share(one.place, start, stop) for one, start, stop in _cuts(held, tp_index, tp_size)]


def shares_of_values(fragments: Sequence[Fragment], tp_index: int, tp_size: int) -> list[Values]:
    """The same with values: views of the fragments' tensors."""

    def cut(fragment: Fragment, start: int, stop: int) -> Values:
        columns = {
            name: tensor[start - fragment.start : stop - fragment.start]
            for name, tensor in columns_of(fragment).items()
        }
        return values(Share(fragment.place, start, stop), columns)

    return [cut(fragment, start, stop) for fragment, start, stop in _cuts(fragments, tp_index, tp_size)]


def values(share: Held, columns: Mapping[str, Tensor]) -> Values:
    """A share with its columns, by name."""
    return Values(share.place, share.start, share.stop, **columns)
