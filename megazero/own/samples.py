"""Samples of a program's data set as micro-batches of a model: any object with a length and items by number."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from megazero.data.indexed import DataError
from megazero.data.loader import Loader
from megazero.data.own import marked
from megazero.own.model import BatchTensors
from megazero.own.stage import OwnBatch

Collate = Callable[[list[Any]], BatchTensors]
"""From samples to a micro-batch."""


class SampleSource(Protocol):
    """A data set of a program, such as one of torch. Several threads may read at once (`num_workers`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class OwnSource:
    """The samples of a run. Sample i is item i modulo the length; shuffled, each pass has an order of its own.

    source   the program's data set
    name     its name in messages
    collate  None: tensors, arrays and numbers of a sample are stacked by name (`torch.utils.data.default_collate`)
    seed     by which each pass is shuffled, the same in every layout; None: in the order of the data set

    Raises DataError for an empty data set, and where samples that are read are no micro-batch.
    """

    def __init__(
        self, source: SampleSource, name: str, collate: Collate | None = None, seed: int | None = None
    ) -> None:
        self.source, self.name, self._seed = source, name, seed
        self._collate = collate or default_collate
        self._is_mapped = collate is None
        self.number = len(source)
        if self.number == 0:
            raise DataError(f"{name} holds no samples")
        self._order = lru_cache(2)(self._order_of)  # of the pass under way, and of the next

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """The micro-batch of these samples of the run."""
        return self._batch([self._place(number) for number in numbers])

    def contents(self) -> tuple[int, int | None]:
        """(number of samples, checksum of some), by which a checkpoint and other ranks know the data. No checksum: a
        sample that is read twice differs, so that the program draws in it.
        """
        first = self._checksum(0, 0)
        if first != self._checksum(0, 0):
            return self.number, None
        checksum = 0
        for place in marked(self.number):
            checksum = self._checksum(place, checksum)
        return self.number, checksum

    def _checksum(self, place: int, so_far: int) -> int:
        for name, tensor in sorted(self._batch([place]).items()):
            so_far = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), so_far)
            numbers = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            so_far = zlib.crc32(numbers.data, so_far)
        return so_far

    def _place(self, number: int) -> int:
        done, place = divmod(number, self.number)
        return place if self._seed is None else int(self._order(done)[place])

    def _order_of(self, done: int) -> NDArray[np.int64]:
        """The order of the pass behind so many."""
        assert self._seed is not None
        return RandomState([self._seed, done]).permutation(self.number)  # its numbers are the same in every version

    def _batch(self, places: list[int]) -> dict[str, Tensor]:
        samples = [self.source[place] for place in places]
        for place, sample in zip(places, samples, strict=True) if self._is_mapped else ():
            if not isinstance(sample, Mapping):
                raise DataError(
                    f"{self.name}[{place}] is {type(sample).__name__}: a mapping from names to tensors is needed, such "
                    "as {'x': x, 'y': y}; or say collate=, a function from samples to a micro-batch"
                )
        try:
            batch = self._collate(samples)
        except Exception as error:
            raise DataError(
                f"{self.name}: samples {places} are no micro-batch: {str(error).splitlines()[0]}. Say collate=, a "
                "function from samples to a micro-batch, where they have to be padded, for example"
            ) from error
        if not isinstance(batch, Mapping):
            raise DataError(f"collate returns {type(batch).__name__}: a mapping from names to tensors is needed")
        wrong = [name for name, tensor in batch.items() if not isinstance(tensor, Tensor)]
        if wrong:
            what = type(batch[wrong[0]]).__name__
            raise DataError(f"{self.name}: {wrong[0]!r} of a micro-batch is {what}, and no tensor")
        return dict(batch)


class SampleLoader(Loader[OwnBatch]):
    """Makes micro-batches of a program's samples.

    samples  number of samples of the whole run
    when     words for the step under way, beside which micro-batches have numbers: what units draw depends on them
    """

    def __init__(self, source: OwnSource, samples: int, when: Callable[[], str], **how: Any) -> None:
        super().__init__(samples, **how)
        self._source, self._when = source, when

    def micro_batches(self, consumed_samples: int, global_batch: int) -> list[OwnBatch]:
        """See `Loader.micro_batches`."""
        made = super().micro_batches(consumed_samples, global_batch)
        numbers = range(self.dp_rank, self.dp_size * len(made), self.dp_size)
        return [OwnBatch(batch.tensors, f"{self._when()} {n}") for n, batch in zip(numbers, made, strict=True)]

    def _make(self, numbers: range) -> OwnBatch:
        return OwnBatch({name: self._pinned(tensor) for name, tensor in self._source.batch(numbers).items()})

    def _send(self, batch: OwnBatch) -> Callable[[], OwnBatch]:
        take = self._copies.start([*batch.tensors.values()])

        def taken() -> OwnBatch:
            return OwnBatch({name: copy for name, copy in zip(batch.tensors, take(), strict=True) if copy is not None})

        return taken
