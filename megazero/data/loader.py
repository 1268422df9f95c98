"""Micro-batches of one data-parallel rank, prepared ahead of the step by background threads: a loader of a dataset, and
the loaders of a run.

The number of consumed samples is the only state: micro-batch m of rank r has samples consumed + (m * dp + r) * b + j.
So a global batch has the same samples for every dp and micro-batch size, and a resumed run continues with the next
sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megazero.config.schema import Run
from megazero.data.build import Datasets
from megazero.data.dataset import PackedSample, Samples
from megazero.data.indexed import DataError
from megazero.model.batch import MicroBatch
from megazero.mpu.grid import ProcessGrid
from megazero.system.streams import SideStreamCopies

TRAVELS = ("tokens", "labels", "loss_mask", "samples", "documents", "positions")
"""The fields of a micro-batch that the loader fills and copies to the device."""
_Marks = tuple[NDArray | None, NDArray | None, NDArray | None]
"""(loss mask, documents, positions), each [b, s] or None."""
B = TypeVar("B")
"""A micro-batch."""


class Loader(Generic[B]):
    """Makes this rank's micro-batches ahead of the steps that take them. What a micro-batch is, subclasses say.

    samples           number of samples of the whole run
    micro_batch_size  samples of a micro-batch
    num_workers       threads that prepare micro-batches ahead; with 0 `micro_batches` prepares them itself
    device            where micro-batches are copied to, on a stream of their own
    """

    def __init__(
        self,
        samples: int,
        *,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        num_workers: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.samples, self.micro_batch_size = samples, micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.device = torch.device(device)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="loader") if num_workers else None
        self._ahead: dict[tuple[int, int], list[Future[B]]] = {}
        self._copies = SideStreamCopies(self.device)
        self._travelling: dict[tuple[int, int], list[Callable[[], B]]] = {}

    def micro_batches(self, consumed_samples: int, global_batch: int) -> list[B]:
        """This rank's micro-batches of the global batch that follows `consumed_samples`, on the device, in order.

        Raises DataError for samples beyond the dataset's end, or of another length.
        """
        key = (consumed_samples, global_batch)
        ready, travelling = self._ahead.pop(key, None), self._travelling.pop(key, None)
        for stale in self._ahead.values():
            for future in stale:
                future.cancel()
        self._ahead.clear()
        self._travelling.clear()
        if travelling is None:
            made = (
                [self._make(numbers) for numbers in self._numbers(*key)]
                if ready is None
                else [future.result() for future in ready]
            )
            travelling = [self._send(batch) for batch in made]
        return [take() for take in travelling]

    def prefetch(self, consumed_samples: int, global_batch: int) -> None:
        """Start to prepare a global batch. Samples beyond the dataset's end are an error only in `micro_batches`."""
        key = (consumed_samples, global_batch)
        if self._threads is None or key in self._ahead or consumed_samples + global_batch > self.samples:
            return
        self._ahead[key] = [self._threads.submit(self._make, numbers) for numbers in self._numbers(*key)]

    def upload(self) -> None:
        """Start to copy prefetched global batches to the device, if they are ready."""
        for key, futures in self._ahead.items():
            if key not in self._travelling and all(future.done() and future.exception() is None for future in futures):
                self._travelling[key] = [self._send(future.result()) for future in futures]

    def close(self) -> None:
        """Stop the threads and drop prefetched micro-batches."""
        self._ahead.clear()
        self._travelling.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _numbers(self, consumed: int, global_batch: int) -> list[range]:
        size, ranks = self.micro_batch_size, self.dp_size
        if global_batch < 1 or global_batch % (size * ranks):
            raise DataError(
                f"--global-batch-size {global_batch} is not a multiple of --micro-batch-size {size} x dp {ranks} = "
                f"{size * ranks}"
            )
        if consumed < 0 or consumed + global_batch > self.samples:
            raise DataError(
                f"samples {consumed} to {consumed + global_batch - 1} are asked of a dataset of {self.samples}"
            )
        firsts = range(consumed + self.dp_rank * size, consumed + global_batch, size * ranks)
        return [range(first, first + size) for first in firsts]

    def _make(self, numbers: range) -> B:
        """A micro-batch of these samples, in host memory. Called by several threads."""
        raise NotImplementedError

    def _send(self, batch: B) -> Callable[[], B]:
        """Start to copy a micro-batch to the device. Returns a function that returns the copy."""
        raise NotImplementedError

    def _pinned(self, tensor: Tensor) -> Tensor:
        """A tensor whose memory is pinned if it will be copied to a GPU, so that the copy is asynchronous."""
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


class TrainLoader(Loader[MicroBatch]):
    """Makes micro-batches of a dataset of tokens.

    eod_id             the separator, which ends a document
    eod_mask_loss      the prediction at a separator does not count, as with Megatron's --eod-mask-loss
    document_mask      number the documents of each sample; a separator belongs to the document that it ends
    restart_positions  give packed samples the positions of tokens within their documents

    Packed samples have their own loss mask and documents, whatever eod_mask_loss and document_mask are. Raises
    DataError where these two need an eod_id that is None.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        seq_length: int,
        eod_id: int | None = None,
        eod_mask_loss: bool = False,
        document_mask: bool = False,
        restart_positions: bool = False,
        num_workers: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if eod_id is None and (eod_mask_loss or document_mask):
            flag = "--eod-mask-loss" if eod_mask_loss else "--document-mask"
            raise DataError(f"{flag} needs to know the separator: give --eod-id, or a tokenizer that has one")
        super().__init__(
            len(dataset),
            dp_rank=dp_rank,
            dp_size=dp_size,
            micro_batch_size=micro_batch_size,
            num_workers=num_workers,
            device=device,
        )
        self.dataset, self.seq_length = dataset, seq_length
        self.eod_id, self.eod_mask_loss, self.document_mask = eod_id, eod_mask_loss, document_mask
        self.restart_positions = restart_positions

    def _make(self, numbers: range) -> MicroBatch:
        samples = [self.dataset[number] for number in numbers]
        text = np.stack([sample.tokens if isinstance(sample, PackedSample) else sample for sample in samples])
        if text.shape[1] != self.seq_length + 1:
            raise DataError(
                f"samples have {text.shape[1]} tokens, but --seq-length {self.seq_length} needs {self.seq_length + 1}"
            )
        packed = [sample for sample in samples if isinstance(sample, PackedSample)]
        assert len(packed) in (0, len(samples)), "a data set is packed or it is not"
        mask, documents, positions = self._packed(packed) if packed else self._separated(text[:, :-1])
        return MicroBatch(
            tokens=self._tensor(text[:, :-1]),
            labels=self._tensor(text[:, 1:]),
            loss_mask=None if mask is None else self._tensor(mask),
            samples=self._tensor(np.arange(numbers.start, numbers.stop, dtype=np.int64)),
            documents=None if documents is None else self._tensor(documents),
            positions=None if positions is None else self._tensor(positions),
        )

    def _packed(self, samples: Sequence[PackedSample]) -> _Marks:
        documents = np.stack([sample.documents for sample in samples])
        positions = within_documents(documents) if self.restart_positions else None
        return np.stack([sample.loss_mask for sample in samples]), documents, positions

    def _separated(self, inputs: NDArray[np.int64]) -> _Marks:
        ends = inputs == self.eod_id
        return (
            ~ends if self.eod_mask_loss else None,
            np.cumsum(ends, axis=1) - ends if self.document_mask else None,
            None,
        )

    def _tensor(self, values: NDArray) -> Tensor:
        return self._pinned(torch.from_numpy(np.ascontiguousarray(values)))

    def _send(self, batch: MicroBatch) -> Callable[[], MicroBatch]:
        take = self._copies.start([getattr(batch, name) for name in TRAVELS])
        return lambda: MicroBatch(**dict(zip(TRAVELS, take(), strict=True)))  # type: ignore[arg-type]


def within_documents(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of tokens within their documents: int64 [b, s] -> the same. A document is a run of equal numbers."""
    places = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, dtype=np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


@dataclass(frozen=True)
class Batches:
    """The loaders of this rank. Those of evaluations are keyed by metric: valid_loss, valid_loss/NAME, test_loss."""

    train: Loader[Any]
    valid: Mapping[str, Loader[Any]]
    test: Mapping[str, Loader[Any]]

    def close(self) -> None:
        """Stop the loaders' threads."""
        for loader in (self.train, *self.valid.values(), *self.test.values()):
            loader.close()


def batches_of(run: Run, datasets: Datasets, grid: ProcessGrid, validation_samples: int) -> Batches:
    """The loaders of a run on this rank. validation_samples: of one evaluation; a set with fewer is not evaluated.

    Raises DataError if a mask needs the separator token and the run has no --eod-id.
    """
    train = _loader(run, grid, datasets.train, run.data.num_workers)
    test = {"test_loss": _loader(run, grid, datasets.test, workers=0)} if run.trainer.test_iters else {}
    return Batches(train, _validation(run, datasets, grid, validation_samples), test)


def _validation(run: Run, datasets: Datasets, grid: ProcessGrid, least: int) -> dict[str, TrainLoader]:
    """Loaders of the validation sets that have `least` samples for an evaluation."""
    if run.trainer.eval_iters == 0:
        return {}
    sets = {"valid_loss": datasets.valid}
    sets |= {f"valid_loss/{name}": dataset for name, dataset in datasets.named_valid.items()}
    return {name: _loader(run, grid, dataset, workers=0) for name, dataset in sets.items() if len(dataset) >= least}


def _loader(run: Run, grid: ProcessGrid, dataset: Samples, workers: int) -> TrainLoader:
    return TrainLoader(
        dataset,
        dp_rank=grid.at.dp,
        dp_size=grid.axes.dp,
        micro_batch_size=run.schedule.micro_batch_size,
        seq_length=run.model.seq_length,
        eod_id=run.data.eod_id,
        eod_mask_loss=run.data.eod_mask_loss,
        # Conversations are packed with a mask of their own, by their places in the sample.
        document_mask=run.model.document_mask and not run.data.instruction_data,
        # ALiBi and rotary angles are differences of positions, which are the same from any start.
        restart_positions=run.model.position_embedding == "learned",
        num_workers=workers,
        device=grid.device,
    )
