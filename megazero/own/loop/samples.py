"""Samples of a program's data set as micro-batches of a model: any object with a length and items by number.

A sample may be drawn, by the generators of torch, NumPy and Python that are one for the process. They are seeded in
front of each sample, by its number in the run, and are as before behind it: so a drawn sample is the same on every rank
and after a resume, and another one in the next pass. So is what draws where samples become a micro-batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from megazero.own.units.model import BatchTensors
from megazero.own.units.refusals import tensor_digest
from megazero.own.units.stage import OwnBatch
from megazero.system.generators import NoDraws, generator_states, host_generators_kept, seed_generators
from megazero.system.notes import add_note

Collate = Callable[[list[Any]], BatchTensors]
"""From samples to a micro-batch."""


class SampleSource(Protocol):
    """A data set of a program, such as one of torch. Several threads may read at once (`num_workers`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class SampleContents:
    """By what a checkpoint and other ranks know a data set.

    number    of samples
    checksum  of some of them; None: a sample that is read twice with the same seed differs
    order     the seed by which passes are shuffled; None: they are not
    draws     whether some sample is drawn by a generator of the process
    """

    number: int
    checksum: int | None
    order: int | None
    draws: bool = False


class OwnSource:
    """The samples of a run. Sample i is item i modulo the length; shuffled, each pass has an order of its own.

    source   the program's data set
    name     its name in messages
    collate  None: tensors, arrays and numbers of a sample are stacked by name (`torch.utils.data.default_collate`)
    seed     of what is drawn in samples
    shuffle  whether each pass has an order of its own, by the seed, the same in every layout

    Raises DataError for an empty data set, and where samples that are read are no micro-batch.
    """

    def __init__(
        self, source: SampleSource, name: str, collate: Collate | None = None, seed: int = 0, *, shuffle: bool = False
    ) -> None:
        self.source, self.name, self._seed, self._shuffle = source, name, seed % 2**32, shuffle
        self._collate = collate or default_collate
        self._stacks = collate is None
        self.number = len(source)
        if self.number == 0:
            raise DataError(f"{name} holds no samples")
        self._order = lru_cache(2)(self._order_of)  # of the pass under way, and of the next

    def batch(self, numbers: Sequence[int], *, seeded: bool) -> dict[str, Tensor]:
        """The micro-batch of these samples of the run.

        seeded: whether generators of the process are seeded for it, in which case no other thread may use them. If not,
        what draws by torch's is an error
        """
        places = [self._place(number) for number in numbers]
        if not seeded:
            with NoDraws(f"a sample of {self.name} among {places}"):
                return self._collated(places, [self._sample(place) for place in places])
        with host_generators_kept():
            samples = []
            for number, place in zip(numbers, places, strict=True):
                self._seed_by(f"sample {number}")
                samples.append(self._sample(place))
            self._seed_by(f"micro-batch of sample {numbers[0]}")
            return self._collated(places, samples)

    def contents(self, size: int) -> SampleContents:
        """Read some samples, and a micro-batch of this size, to know the data set by them."""
        draws, checksums = False, list[int]()
        for place in [0, *marked(self.number)]:
            with host_generators_kept():
                seed_generators(place)
                before = generator_states()
                checksums.append(_checksum(self._sample(place), checksums[-1] if len(checksums) > 1 else 0))
                draws |= before != generator_states()
        places = [place % self.number for place in range(size)]
        with host_generators_kept():
            before = generator_states()
            self._collated(places, [self._sample(place) for place in places])
            draws |= before != generator_states()
        is_fixed = checksums[0] == checksums[1]  # the first one is read twice
        return SampleContents(
            self.number, checksums[-1] if is_fixed else None, self._seed if self._shuffle else None, draws
        )

    def _seed_by(self, words: str) -> None:
        seed_generators(zlib.crc32(f"{self._seed} {words}".encode()))

    def _place(self, number: int) -> int:
        done, place = divmod(number, self.number)
        return int(self._order(done)[place]) if self._shuffle else place

    def _order_of(self, done: int) -> NDArray[np.int64]:
        """The order of the pass behind so many."""
        return RandomState([self._seed, done]).permutation(self.number)  # its numbers are the same in every version

    def _sample(self, place: int) -> Any:
        try:
            return self.source[place]
        except Exception as error:
            add_note(error, f"in {self.name}[{place}]")
            raise

    def _collated(self, places: Sequence[int], samples: list[Any]) -> dict[str, Tensor]:
        if self._stacks:
            self._require_alike(places, samples)
        try:
            batch = self._collate(samples)
        except Exception as error:
            hint = ". Say collate=, a function from samples to a micro-batch, where they have to be padded, for example"
            why = f"{str(error).splitlines()[0]}{hint * self._stacks}"
            raise DataError(f"{self.name}: samples {[*places]} are no micro-batch: {why}") from error
        if not isinstance(batch, Mapping):
            raise DataError(f"collate returns {type(batch).__name__}: a mapping from names to tensors is needed")
        wrong = [name for name, tensor in batch.items() if not isinstance(tensor, Tensor)]
        if wrong:
            what = type(batch[wrong[0]]).__name__
            raise DataError(f"{self.name}: {wrong[0]!r} of a micro-batch is {what}, and no tensor")
        return dict(batch)

    def _require_alike(self, places: Sequence[int], samples: Sequence[Any]) -> None:
        """Raise DataError for samples that are no mappings, or have other names: some would be left out."""
        for place, sample in zip(places, samples, strict=True):
            if not isinstance(sample, Mapping):
                raise DataError(
                    f"{self.name}[{place}] is {type(sample).__name__}: a mapping from names to tensors is needed, such "
                    "as {'x': x, 'y': y}; or say collate=, a function from samples to a micro-batch"
                )
            if sample.keys() != samples[0].keys():
                both = [", ".join(map(str, each)) for each in (sample, samples[0])]
                raise DataError(f"{self.name}[{place}] has {both[0]}, and {self.name}[{places[0]}] has {both[1]}")


def _checksum(value: Any, so_far: int) -> int:
    """Of tensors, arrays and numbers in a sample; of other objects their class counts."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            so_far = _checksum(value[name], zlib.crc32(str(name).encode(), so_far))
        return so_far
    if isinstance(value, list | tuple):
        for each in value:
            so_far = _checksum(each, so_far)
        return so_far
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        so_far = zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode(), so_far)
        return tensor_digest(value, so_far)
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), zlib.crc32(str(value.dtype).encode(), so_far))
    plain = isinstance(value, str | bytes | int | float | complex | np.generic) or value is None
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode(), so_far)


class SampleLoader(Loader[OwnBatch]):
    """Makes micro-batches of a program's samples.

    samples      number of samples of the whole run
    when         words for the step under way, beside which micro-batches have numbers: what units draw depends on them
    num_workers  as of `Loader`. With 0 nothing is read ahead, while units draw, and samples may be drawn
    """

    def __init__(
        self, source: OwnSource, samples: int, when: Callable[[], str], *, num_workers: int, **how: Any
    ) -> None:
        super().__init__(samples, num_workers=num_workers, **how)
        self._source, self._when, self._seeded = source, when, num_workers == 0

    def micro_batches(self, consumed_samples: int, global_batch: int) -> list[OwnBatch]:
        """See `Loader.micro_batches`."""
        made = super().micro_batches(consumed_samples, global_batch)
        numbers = range(self.dp_rank, self.dp_size * len(made), self.dp_size)
        return [OwnBatch(batch.tensors, f"{self._when()} {n}") for n, batch in zip(numbers, made, strict=True)]

    def _make(self, numbers: range) -> OwnBatch:
        tensors = self._source.batch(numbers, seeded=self._seeded)
        return OwnBatch({name: self._pinned(tensor) for name, tensor in tensors.items()})

    def _send(self, batch: OwnBatch) -> Callable[[], OwnBatch]:
        take = self._copies.start([*batch.tensors.values()])

        def taken() -> OwnBatch:
            return OwnBatch({name: copy for name, copy in zip(batch.tensors, take(), strict=True) if copy is not None})

        return taken
