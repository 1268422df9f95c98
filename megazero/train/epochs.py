"""How often a run reads its data: --epochs converted to samples, and samples to epochs for the banner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megazero.config.schema import Run
from megazero.data.build import Datasets, parse_data_path, train_tokens
from megazero.data.indexed import DataError
from megazero.data.instructions import build_instructions
from megazero.data.packing import PackedDataset
from megazero.data.progress import Report
from megazero.data.tokenizer import Tokenizer

NAMED = 4
"""Up to this many pairs of a blend, the banner gives the epochs of each."""


def with_samples(run: Run, tokenizer: Tokenizer | None, report: Report) -> Run:
    """The run with --epochs replaced by --train-samples.

    An epoch of one pair is all tokens of its training split; an epoch of instruction data is all samples that its
    conversations are packed into. An epoch of a blend has as many tokens as its pairs together; by their weights, some
    pairs are read more than once in it and some less. Communicates nothing. Raises DataError if the epochs have fewer
    samples than the first global batch.
    """
    schedule = run.schedule
    if schedule.epochs is None:
        return run
    if run.data.instruction_data:
        samples = int(schedule.epochs * _packed_samples(run, tokenizer, report))
    else:
        samples = (int(schedule.epochs * sum(train_tokens(run.data))) - 1) // run.model.seq_length
    return _of_length(run, samples)


def with_own_samples(run: Run, rows: int) -> Run:
    """As `epochs_text`, for data of a program: an epoch is `rows` samples."""
    epochs = run.schedule.epochs
    return run if epochs is None else _of_length(run, int(epochs * rows))


def _of_length(run: Run, samples: int) -> Run:
    schedule = run.schedule
    first = schedule.rampup_batch_size[0] if schedule.rampup_batch_size else schedule.global_batch_size
    if samples < first:
        enough = math.ceil(schedule.epochs * (first + 1) / samples) if schedule.epochs and samples else 0
        nearest = (
            f"--epochs {enough}, or --global-batch-size {samples} or less" if samples else "a smaller --seq-length"
        )
        raise DataError(
            f"--epochs {schedule.epochs:g} of the data are {samples:,} samples of {run.model.seq_length:,} tokens, "
            "fewer than the first global "
            f"batch has, {first}; nearest: {nearest}"
        )
    return replace(run, schedule=replace(schedule, epochs=None, train_samples=samples))


def _packed_samples(run: Run, tokenizer: Tokenizer | None, report: Report) -> int:
    assert tokenizer is not None and run.model.vocab_size is not None, "validated: instruction data has --tokenizer"
    shape = {"seq_length": run.model.seq_length, "vocab_size": run.model.vocab_size}
    datasets, _ = build_instructions(run.data, tokenizer, **shape, samples=(0, 0), report=report)
    assert isinstance(datasets.train, PackedDataset)
    return datasets.train.epoch_samples


def epochs_text(run: Run, datasets: Datasets, samples: int) -> str:
    """How often the run reads its data in `samples` samples: '16.5 epochs'; of a blend, for each pair."""
    if isinstance(datasets.train, PackedDataset):
        return _words(samples / datasets.train.epoch_samples)
    blend, tokens = parse_data_path(run.data.data_path), train_tokens(run.data)
    shares: Sequence[float] = [1.0] if blend.shares is None else blend.shares.tolist()
    read = [share * samples * run.model.seq_length / max(count, 1) for share, count in zip(shares, tokens, strict=True)]
    if len(read) == 1:
        return _words(read[0])
    if len(read) <= NAMED:
        return ", ".join(f"{_words(epochs)} of {prefix}" for epochs, prefix in zip(read, blend.prefixes, strict=True))
    return f"{_number(min(read))} to {_words(max(read))} of {len(read)} pairs"


def own_epochs_text(samples: int, rows: int) -> str:
    """As `epochs_text`, for data of a program: an epoch is `rows` samples."""
    return _words(samples / rows)


def _number(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}" if epochs >= 10 else f"{epochs:.2g}"


def _words(epochs: float) -> str:
    shown = _number(epochs)
    return f"{shown} epoch{'' if shown == '1' else 's'}"
