"""Which part of its fragments each rank writes: every element is written once, and the parts are nearly equal.

ZeRO divides the state of a dp group equally between its ranks. A parameter that is replicated over tp has the same
fragments on every tp rank. These fragments, laid end to end, are cut into one equal part for each tp rank. Giving each
rank whole fragments was rejected, because one of them may be as large as a learned position table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from megazero.checkpoint.format import columns_of
from megazero.zero.fragment import Fragment, FragmentSpec

_Fragment = TypeVar("_Fragment", bound=FragmentSpec)


def _cuts(held: Sequence[_Fragment], tp_index: int, tp_size: int) -> Iterator[tuple[_Fragment, int, int]]:
    """(fragment, start, stop) for each fragment of which the tp rank writes the elements [start, stop)."""
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
    """The fragments that a rank writes.

    held: all fragments of the rank, in an order that is the same on every tp rank.
    """
    return [FragmentSpec(one.spec, start, stop) for one, start, stop in _cuts(held, tp_index, tp_size)]


def views_to_write(held: Sequence[Fragment], tp_index: int, tp_size: int) -> list[Fragment]:
    """As `fragments_to_write`, with views of the fragments' tensors."""

    def cut(one: Fragment, start: int, stop: int) -> Fragment:
        columns = {name: tensor[start - one.start : stop - one.start] for name, tensor in columns_of(one).items()}
        return Fragment(one.spec, start, stop, **columns)

    return [cut(one, start, stop) for one, start, stop in _cuts(held, tp_index, tp_size)]
