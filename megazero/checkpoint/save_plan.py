"""What each rank writes of what it holds: everything once, and as much as its neighbours.

ZeRO gives every rank of a dp group an equal range of what that group holds. Parameters that are replicated over tp are
held by every tp rank, as the same ranges: laid end to end they are cut into one equal part per tp rank, which cuts at
most tp - 1 fragments in two. Giving each rank whole fragments was rejected: a learned position table is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from megazero.checkpoint.format import columns_of
from megazero.zero.fragment import Fragment, FragmentSpec

_Fragment = TypeVar("_Fragment", bound=FragmentSpec)


def _cuts(held: Sequence[_Fragment], tp_index: int, tp_size: int) -> Iterator[tuple[_Fragment, int, int]]:
    """(fragment, start, stop) of what the tp rank writes of the fragments that it holds."""
    total = sum(one.numel for one in held if not one.spec.tp_sharded)
    first, last = (total * index // tp_size for index in (tp_index, tp_index + 1))
    offset = 0
    for one in held:
        start, stop = one.start, one.stop
        if start < stop and not one.spec.tp_sharded:
            begin, offset = offset, offset + stop - start
            start, stop = start + max(first - begin, 0), stop - max(offset - last, 0)
        if start < stop:
            yield one, start, stop


def fragments_to_write(held: Sequence[FragmentSpec], tp_index: int, tp_size: int) -> list[FragmentSpec]:
    """What a rank writes, by layout arithmetic.

    held: all that it holds, in the order in which every tp rank holds it.
    """
    return [FragmentSpec(one.spec, start, stop) for one, start, stop in _cuts(held, tp_index, tp_size)]


def views_to_write(held: Sequence[Fragment], tp_index: int, tp_size: int) -> list[Fragment]:
    """The same with values: views of the fragments' tensors."""

    def cut(one: Fragment, start: int, stop: int) -> Fragment:
        columns = {name: tensor[start - one.start : stop - one.start] for name, tensor in columns_of(one).items()}
        return Fragment(one.spec, start, stop, **columns)

    return [cut(one, start, stop) for one, start, stop in _cuts(held, tp_index, tp_size)]
