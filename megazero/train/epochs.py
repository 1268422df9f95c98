"""How often a run reads its data: --epochs in samples, and samples in epochs for the banner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.build import Datasets, parse_data_path, train_tokens
from megazero.data.instructions import build_instructions
from megazero.data.own import OwnSamples
from megazero.data.packing import PackedDataset
from megazero.data.progress import Report
from megazero.data.tokenizer import Tokenizer
from megazero.system.words import counted

NAMED = 4
"""Up to this many pairs of a blend, the banner gives the epochs of each."""


@dataclass(frozen=True)
class Epoch:
    """How much one pass over the training data is: samples, or tokens that become samples one behind the other."""

    samples: int | None = None
    tokens: int = 0

    def samples_in(self, epochs: float, seq_length: int) -> int:
        """Whole samples of seq_length tokens, and one more token as the last label, in this many passes."""
        if self.samples is not None:
            return int(epochs * self.samples)
        return (int(epochs * self.tokens) - 1) // seq_length


def epoch_of(run: Run, tokenizer: Tokenizer | None, report: Report) -> Epoch | None:
    """An epoch of the data that the run names; None if the run counts no epochs.

    An epoch of one pair is all tokens of its training split; an epoch of instruction data is all samples that its
    conversations are packed into, which are read for that. An epoch of a blend has as many tokens as its pairs
    together; by their weights, some pairs are read more than once in it and some less. Communicates nothing.
    """
    if run.schedule.epochs is None:
        return None
    if not run.data.instruction_data:
        return Epoch(tokens=sum(train_tokens(run.data)))
    datasets, _ = instruction_datasets(run, tokenizer, (0, 0), report)
    assert isinstance(datasets.train, PackedDataset)
    return Epoch(samples=datasets.train.epoch_samples)


def instruction_datasets(
    run: Run, tokenizer: Tokenizer | None, samples: tuple[int, int], report: Report
) -> tuple[Datasets, str]:
    """As `build_instructions`, for the conversations that a run names."""
    assert tokenizer is not None and run.model.vocab_size is not None, "validated: instruction data has --tokenizer"
    shape = {"seq_length": run.model.seq_length, "vocab_size": run.model.vocab_size}
    return build_instructions(run.data, tokenizer, **shape, samples=samples, report=report)


def samples_of(run: Run, epoch: Epoch, dp: int) -> int:
    """The samples of --epochs. Raises ConfigError if they are fewer than the first global batch has, with the least
    whole number of epochs and the largest batch that fit. dp: for this advice.
    """
    schedule, seq_length = run.schedule, run.model.seq_length
    assert schedule.epochs is not None
    first = schedule.rampup_batch_size[0] if schedule.rampup_batch_size else schedule.global_batch_size
    samples = epoch.samples_in(schedule.epochs, seq_length)
    if samples >= first:
        return samples
    nearest = ["a smaller --seq-length"]
    if samples > 0:
        # Samples of epochs are rounded down, so that no formula gives the least number: from one above it down.
        enough = math.ceil(schedule.epochs * (first + 1) / samples)
        while enough > 1 and epoch.samples_in(enough - 1, seq_length) >= first:
            enough -= 1
        nearest = [f"--epochs {enough}"]
    if samples > 0 and schedule.rampup_batch_size is None:
        step, smaller = schedule.micro_batch_size * dp, ""
        if samples < step:
            step, smaller = dp, " --micro-batch-size 1"
        batch = samples // step * step
        nearest += [f"--global-batch-size {batch}{smaller}"] * (batch > 0)
    raise ConfigError(
        [
            f"--epochs {schedule.epochs:g} of the data are {counted(max(0, samples), 'sample')} of {seq_length:,} "
            f"tokens, fewer than the first global batch has, {first}; nearest: {', or '.join(nearest)}"
        ]
    )


def epochs_text(run: Run, datasets: Datasets, samples: int) -> str:
    """How often the run reads its data in `samples` samples: '16.5 epochs'; of a blend, for each pair."""
    if isinstance(datasets.train, PackedDataset | OwnSamples):
        return _words(samples / datasets.train.plans[0][0])  # the first number of such a plan is an epoch's samples
    blend, tokens = parse_data_path(run.data.data_path), train_tokens(run.data)
    shares: Sequence[float] = [1.0] if blend.shares is None else blend.shares.tolist()
    length = run.model.seq_length
    epochs = [share * samples * length / max(count, 1) for share, count in zip(shares, tokens, strict=True)]
    if len(epochs) == 1:
        return _words(epochs[0])
    if len(epochs) <= NAMED:
        return ", ".join(f"{_words(number)} of {prefix}" for number, prefix in zip(epochs, blend.prefixes, strict=True))
    return f"{_number(min(epochs))} to {_words(max(epochs))} of {len(epochs)} pairs"


def _number(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}" if epochs >= 10 else f"{epochs:.2g}"


def _words(epochs: float) -> str:
    shown = _number(epochs)
    return f"{shown} epoch{'' if shown == '1' else 's'}"
