"""A model state whose values are in memory a portion at a time only, and that sees who holds more."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.checkpoint.format import COLUMNS
from megazero.checkpoint.manager import Checkpoints
from megazero.checkpoint.resume_changes import record_of
from megazero.config.schema import CheckpointConfig, Run
from megazero.mpu.grid import single_process_grid, single_rank_group
from megazero.zero.layout import Fragment, FragmentSpec, StoredFragment

Rest = dict[tuple[str, str], Tensor]
"""The values that rest somewhere, by (name, column)."""


def cut(held: Sequence[FragmentSpec], most: int) -> list[list[tuple[FragmentSpec, int, int]]]:
    """The fragments laid end to end in portions of so many elements: (fragment, start, stop) of each part."""
    portions: list[list[tuple[FragmentSpec, int, int]]] = [[]]
    room = most
    for one in held:
        start = one.start
        while start < one.stop:
            if not room:
                portions.append([])
                room = most
            stop = min(one.stop, start + room)
            portions[-1].append((one, start, stop))
            room, start = room - (stop - start), stop
    return portions


class RestingState:
    """The fragments `held`, whose values are in `rest`.

    A portion is a copy, is spoilt when it is over, and its memory is looked for: `most_alive` is the largest number of
    portions of which somebody held memory at once, `closed` the number of those who were done with all portions.
    """

    resident = False

    def __init__(self, held: Sequence[FragmentSpec], rest: Rest, most: int, spoil: bool = True) -> None:
        self.held, self.rest, self.parts, self.spoil = held, rest, cut(held, most), spoil
        self.alive: list[list[StorageWeakRef]] = []
        self.most_alive = self.loaded = self.closed = 0
        self.before: Callable[[int], None] = lambda number: None
        """Called with the number of each portion before it comes."""

    def stored(self) -> list[list[StoredFragment]]:
        dtypes = {c: {n: v.dtype for (n, of), v in self.rest.items() if of == c} for c in COLUMNS}

        def stored(one: FragmentSpec, start: int, stop: int) -> StoredFragment:
            own = {c: found[one.spec.name] for c, found in dtypes.items() if one.spec.name in found}
            return StoredFragment(one.spec, start, stop, own)

        return [[stored(*part) for part in portion] for portion in self.parts]

    def portions(self, fill: Collection[str] = ()) -> Generator[list[Fragment], None, None]:
        return self._portions(fill)

    def after_load(self, filled: Collection[str] = ()) -> None:
        self.loaded += 1

    def _portions(self, fill: Collection[str]) -> Generator[list[Fragment], None, None]:
        try:
            for number, held in enumerate(self.stored()):
                self.before(number)
                portion = [self._brought(one, fill) for one in held]
                self._count(portion)
                yield portion
                self._put_back(portion, fill)
                del portion
        finally:
            self.closed += 1

    def _place(self, one: FragmentSpec, column: str) -> Tensor:
        first = next(whole.start for whole in self.held if whole.spec.name == one.spec.name)
        return self.rest[one.spec.name, column][one.start - first : one.stop - first]

    def _brought(self, one: StoredFragment, fill: Collection[str]) -> Fragment:
        values = {column: self._place(one, column).clone() for column in one.dtypes}
        for column in values.keys() & fill:
            values[column].fill_(torch.nan)
        return Fragment(one.spec, one.start, one.stop, values)

    def _put_back(self, portion: Sequence[Fragment], fill: Collection[str]) -> None:
        for one in portion:
            for column, values in one.columns.items():
                if column in fill:
                    self._place(one, column).copy_(values)
                if self.spoil:
                    values.fill_(torch.nan)

    def _count(self, portion: Sequence[Fragment]) -> None:
        tensors = [values for one in portion for values in one.columns.values()]
        self.alive.append([StorageWeakRef(values.untyped_storage()) for values in tensors])
        self.alive = [refs for refs in self.alive if not all(ref.expired() for ref in refs)]
        self.most_alive = max(self.most_alive, len(self.alive))


def rest_of(fragments: Sequence[Fragment]) -> Rest:
    """Copies of the values of fragments."""
    return {(one.spec.name, column): values.clone() for one in fragments for column, values in one.columns.items()}


def checkpoints_of(
    folder: Path,
    state: RestingState,
    all_fragments: Callable[[], Sequence[Sequence[FragmentSpec]]],
    run: Run | None = None,
    weights: torch.dtype | None = None,
    **config: object,
) -> Checkpoints:
    """A run's checkpoints of such a state; the caller calls `claim`."""
    cfg = replace(CheckpointConfig(save=str(folder), load=str(folder)), **config)  # type: ignore[arg-type]
    grid = single_process_grid()
    return Checkpoints(
        cfg, record_of(run or Run()), state, all_fragments, grid, "t", single_rank_group(), None, weights
    )


def files_of(folder: Path) -> dict[str, str]:
    """The sha256 of a checkpoint's files."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
