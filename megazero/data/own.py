"""Data and a tokenizer that a program passes, instead of those that a configuration names."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megazero.config.derive import validation_samples
from megazero.config.schema import Run
from megazero.data.build import Datasets
from megazero.data.dataset import EmptyDataset, Samples
from megazero.data.indexed import DataError
from megazero.data.tokenizer import Tokenizer

MARKS = 16
"""Number of samples in a dataset's checksum."""


def marked(number: int) -> list[int]:
    """Which of so many samples are in a dataset's checksum."""
    return np.unique(np.linspace(0, number - 1, MARKS).astype(np.int64)).tolist()


class Rows(Protocol):
    """A dataset of a program: n samples of seq_length + 1 token ids each. Inputs are [:-1], labels [1:].

    Item i is a one-dimensional array, tensor or list of integers, the same each time and on every rank. Several threads
    may read at once (--num-workers).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class OwnSamples:
    """The rows of a program as samples of a run, in the program's order. Sample i is row i modulo the number of rows.

    rows        the program's dataset
    name        its name in messages
    seq_length  tokens of a sample, without the last label
    vocab_size  bound of the ids
    samples     number of samples that the run takes

    Raises DataError for an empty dataset, and when a wrong row is read.
    """

    def __init__(self, rows: Rows, name: str, seq_length: int, vocab_size: int, samples: int) -> None:
        self.rows, self.name, self.seq_length, self.vocab_size = rows, name, seq_length, vocab_size
        self._samples, self._number = samples, len(rows)
        if self._number == 0:
            raise DataError(f"{name} holds no samples")
        self.plans = ((self._number, self._fingerprint()),)
        """(number of rows, checksum of some), by which a checkpoint identifies the data."""

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self._samples:
            raise IndexError(f"{self.name}: sample {index} of {self._samples}")
        return self._row(index % self._number)

    def _row(self, index: int) -> NDArray[np.int64]:
        given = self.rows[index]
        try:
            row = np.asarray(given)
        except (TypeError, ValueError, RuntimeError) as error:  # numbers of several lengths, a tensor on a card
            raise DataError(f"{self.name}[{index}] is {type(given).__name__}, and no array: {error}") from error
        if row.dtype.kind not in "iu" or row.shape != (self.seq_length + 1,):
            raise DataError(
                f"{self.name}[{index}] is {row.dtype} of shape {list(row.shape)}, not {self.seq_length + 1} integers: "
                f"model.seq_length {self.seq_length} and the label of the last"
            )
        low, high = int(row.min()), int(row.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise DataError(f"{self.name}[{index}] holds token id {wrong}, outside the vocabulary of {self.vocab_size}")
        return row.astype(np.int64)

    def _fingerprint(self) -> int:
        checksum = 0
        for index in marked(self._number):
            checksum = zlib.crc32(self._row(index).tobytes(), checksum)
        return checksum


@dataclass(frozen=True)
class OwnData:
    """Data and tokenizer of a program.

    train      rows to train on; None: the data that the configuration names
    valid      name of the metric (valid_loss, valid_loss/NAME) -> rows to validate on
    tokenizer  replaces data.tokenizer of the run; None: the configuration's
    """

    train: Rows | None = None
    valid: Mapping[str, Rows] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None

    def problems(self, run: Run) -> list[str]:
        """A sentence for each contradiction between the configuration and this."""
        found = []
        if self.tokenizer is not None and run.data.tokenizer is not None:
            found.append(f"a tokenizer is handed in, and data.tokenizer {run.data.tokenizer} names another: give one")
        if self.train is None:
            if self.valid:
                found.append("valid_data is handed in without train_data: name it by data.valid_data_path")
            if self.tokenizer is not None and not (run.data.data_path or run.data.instruction_data):
                found.append("a tokenizer is handed in without data: the default corpus brings its own tokenizer")
            return found
        named = {
            name: getattr(run.data, name)
            for name in ("data_path", "valid_data_path", "instruction_data", "valid_instruction_data")
        }
        found += [
            f"train_data is handed in, and data.{name} {' '.join(words)} names other data: give one"
            for name, words in named.items()
            if words
        ]
        if run.trainer.test_iters:
            found.append(f"trainer.test_iters {run.trainer.test_iters}: data that is handed in has no test part")
        if run.model.vocab_size is None:
            found.append("model.vocab_size is needed with train_data and no tokenizer: ids are used as they are")
        if (run.model.document_mask or run.data.eod_mask_loss) and run.data.eod_id is None:
            found.append(
                "model.document_mask and data.eod_mask_loss need the token that ends a document: give data.eod_id"
            )
        return found


def named_as_given(metric: str) -> str:
    """What the program calls a validation set: valid_data of valid_loss, valid_data['NAME'] of valid_loss/NAME."""
    return "valid_data" + "".join(f"[{part!r}]" for part in metric.split("/", 1)[1:])


def too_short(run: Run, valid: Mapping[str, Sized]) -> list[str]:
    """A sentence for each validation set, by metric, that has fewer samples than an evaluation takes."""
    needed, factors = validation_samples(run), (run.trainer.eval_iters, run.schedule.global_batch_size)
    return [
        f"{named_as_given(metric)} holds {len(samples)} samples; trainer.eval_iters {factors[0]} x "
        f"schedule.global_batch_size {factors[1]} takes {needed}"
        for metric, samples in valid.items()
        if len(samples) < needed
    ]


def own_datasets(run: Run, own: OwnData, samples: int) -> Datasets:
    """The datasets of a run from a program's data: `samples` for training, of each validation set those of an
    evaluation.

    Raises DataError for rows that are no samples, and for validation sets that are too short.
    """
    assert own.train is not None and run.model.vocab_size is not None
    length, vocabulary = run.model.seq_length, run.model.vocab_size
    train = OwnSamples(own.train, "train_data", length, vocabulary, samples)
    sets: dict[str, Samples] = {}
    if problems := too_short(run, own.valid):
        raise DataError("; ".join(problems))
    evaluated = validation_samples(run)
    for metric, rows in own.valid.items() if evaluated else ():
        name = named_as_given(metric)
        sets[metric.removeprefix("valid_loss/")] = OwnSamples(rows, name, length, vocabulary, evaluated)
    valid = sets.pop("valid_loss", EmptyDataset())
    return Datasets(train, valid, EmptyDataset(), sets)
