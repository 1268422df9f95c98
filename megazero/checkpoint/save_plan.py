"""Which part of its fragments each rank writes: every element is written once, and the parts are nearly equal.

ZeRO divides the state of a dp group equally between its ranks. A parameter that is replicated over tp has the same
fragments on every tp rank. These fragments, laid end to end, are cut into one equal part for each tp rank. Giving each
rank whole fragments was rejected, because one of them may be as large as a learned position table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import torch

from megazero.checkpoint.format import WEIGHT
from megazero.checkpoint.narrowing import narrowed
from megazero.zero.layout import Fragment, FragmentSpec, StoredFragment

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


def stored_to_write(
    held: Sequence[Sequence[StoredFragment]], tp_index: int, tp_size: int, weights: torch.dtype | None = None
) -> list[StoredFragment]:
    """As `fragments_to_write`, with dtypes. held: by portion, as a state tells them; parts are put together. weights:
    only these are written, rounded to this dtype; None: every column as it is.
    """
    whole = list[StoredFragment]()
    for part in chain.from_iterable(held):
        if whole and whole[-1].spec.name == part.spec.name and whole[-1].stop == part.start:
            whole[-1] = replace(whole[-1], stop=part.stop)
        else:
            whole.append(part)
    found = [replace(one, start=start, stop=stop) for one, start, stop in _cuts(whole, tp_index, tp_size)]
    return found if weights is None else [replace(one, dtypes={WEIGHT: weights}) for one in found]


def values_to_write(
    portions: Iterable[Sequence[Fragment]], written: Sequence[StoredFragment]
) -> Iterator[list[Fragment]]:
    """Portions of a rank's state, cut to the fragments that it writes: their columns, as views where the dtype is the
    state's. No two portions are held.
    """
    by_name = {one.spec.name: one for one in written}

    def cut(one: Fragment) -> Fragment | None:
        wanted = by_name.get(one.spec.name)
        if wanted is None or wanted.stop <= one.start or one.stop <= wanted.start:
            return None
        start, stop = max(one.start, wanted.start), min(one.stop, wanted.stop)
        held = one.columns
        columns = {
            name: narrowed(held[name][start - one.start : stop - one.start], dtype, one.spec.name)
            for name, dtype in wanted.dtypes.items()
        }
        return Fragment(one.spec, start, stop, columns)

    for portion in portions:
        yield [part for part in map(cut, portion) if part is not None]
        del portion  # or its memory would be held while the next one comes
