"""Preparation before any process group exists: data, tokenizer, and the manifest of the checkpoint to resume from.

Preparing the default corpus or an index can take minutes. No rank waits in a collective meanwhile, which could time
out: one process of a file system does the work, and the others wait for its file lock. Problems that are found here
are still configuration errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import Change, Comparison, compare
from megazero.config.derive import validation_samples
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.build import Datasets, build_datasets, cache_root
from megazero.data.contents import Contents, cached_contents
from megazero.data.corpus import default_corpus
from megazero.data.indexed import DataError
from megazero.data.own import OwnData, own_datasets
from megazero.data.progress import Report, without_repeats
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.optim.step_plan import StepPlan
from megazero.plan.recompute import recompute_table
from megazero.system import device as devices
from megazero.system.words import counted
from megazero.train.checked import Asked, asked_start, check_start
from megazero.train.epochs import epoch_of, epochs_text, instruction_datasets
from megazero.train.path_checks import of_checkpoint, start_position
from megazero.train.requirements import machine_problems
from megazero.train.resolve import DEFAULT_TOKENIZER, ResolvedRun, Vocabulary, contradictions, resolve
from megazero.train.same_data import data_problems, same_order, saved_run

UNTOLD = 0.05
"""A rest of the samples that fills no batch, up to this share of them, does not change the number of epochs in words:
0.99 epochs are one. The length beside it is exact.
"""


@dataclass(frozen=True)
class Prepared:
    """A resolved run with its data.

    resolved  the run, with all that follows from its files
    datasets  its samples
    tokenizer the program's own or the run's; None without one
    text      a few words about the data, for the banner
    resumed   the checkpoint that the run resumes from, if there is one
    saved     the run that wrote this checkpoint, with the present names of its tokenizer and data
    local_world_size  number of ranks of this host
    contents  what the training data hold, of data that the run names
    """

    resolved: ResolvedRun
    datasets: Datasets
    tokenizer: Tokenizer | None
    text: str
    resumed: FoundCheckpoint | None
    saved: Run | None
    local_world_size: int
    contents: Contents

    @property
    def run(self) -> Run:
        return self.resolved.run

    @property
    def changes(self) -> tuple[Change, ...]:
        """The differences from the run that wrote the checkpoint."""
        return () if self.saved is None else self._compared().changes

    def _compared(self) -> Comparison:
        assert self.resumed is not None and self.saved is not None
        return compare(self.saved, self.run, self.resumed.layout, self.resolved.axes.sizes)

    def problems(self) -> list[str]:
        """Why the run may not go on from the checkpoint, one sentence for each reason."""
        if self.resumed is None or self.saved is None:
            return []
        samples = samples_asked(self.run, self.resumed)
        others = data_problems(self.run, self.saved, self.resumed, self.datasets, self.contents, samples)
        return of_checkpoint(self.resumed, [*self._compared().problems, *others])


def prepare(
    asked: Run, world_size: int, report: Report, own_data: OwnData | None = None, local_ranks: range | None = None
) -> Prepared:
    """Check the run, resolve it and prepare its data, on every rank. Communicates nothing.

    report       called with lines about progress
    own_data     data and tokenizer of a program, used instead of the run's
    local_ranks  the ranks of this host; None: all ranks

    Raises ConfigError for data or folders that cannot be used, for a checkpoint that the run may not resume from, and
    for a budget of activations that cannot be kept.
    """
    if asked.trainer.deterministic:
        devices.use_deterministic_algorithms()
    own_data, local_ranks = own_data or OwnData(), range(world_size) if local_ranks is None else local_ranks
    begun = asked_start(asked, world_size, local_ranks, own_data)
    if problems := [*machine_problems(begun.resolved.run), *check_start(begun)]:
        raise ConfigError(problems)
    try:
        prepared = _named_data(begun, report) if own_data.train is None else _own_data(begun)
    except (DataError, ImportError) as error:  # ImportError: the data need a package, such as jinja2 for chats
        raise ConfigError([str(error)]) from error
    if problems := prepared.problems():
        raise ConfigError(problems)
    resolved = prepared.resolved
    if resolved.facts.kind == "cpu":  # a budget of activations that cannot be kept is known before ranks meet
        recompute_table(resolved.run, resolved.axes, resolved.facts.kind)
    return prepared


def _own_data(begun: Asked) -> Prepared:
    """The data of a program."""
    rows, run = begun.own_data.train, begun.resolved.run
    assert rows is not None
    datasets = own_datasets(run, begun.own_data, samples_used(run, begun.paths.resumed))
    text = f"{counted(len(rows), 'sample')} of the program's own"
    return _prepared(begun, begun.resolved, datasets, begun.paths.tokenizer, text, ())


def _named_data(begun: Asked, report: Report) -> Prepared:
    """The data that the run names, or the default corpus. What they say of themselves resolves the run to its end."""
    resumed, tokenizer = begun.paths.resumed, begun.paths.tokenizer
    asked, facts = begun.resolved.asked, begun.resolved.facts
    text = " ".join(asked.data.data_path)
    if not (asked.data.data_path or asked.data.instruction_data):
        corpus = default_corpus(cache_root(asked.data), report)
        tokenizer = build_tokenizer(DEFAULT_TOKENIZER, corpus.tokenizer_path)
        facts = replace(facts, corpus=corpus, vocabulary=Vocabulary(tokenizer.vocab_size, tokenizer.eod_id))
        text = corpus.description
    report = without_repeats(report)  # the data are opened to count their epochs, and again for the run
    if asked.schedule.epochs is not None and facts.epoch is None:
        facts = replace(facts, epoch=epoch_of(resolve(asked, facts).run, tokenizer, report))
    resolved = begun.resolved
    if facts != resolved.facts:
        resolved = resolve(asked, facts)
        if problems := contradictions(resolved):  # those of the facts before are among the problems of the check
            raise ConfigError(problems)
    run = resolved.run
    needed, used = samples_asked(run, resumed), samples_used(run, resumed)
    datasets, instructions_text = _datasets(run, needed, tokenizer, report)
    if resumed is not None and used != needed and not run.checkpoint.finetune and not same_order(resumed, datasets):
        # Earlier versions built datasets for `samples_used`, and so the checkpoint may have the order of that size.
        earlier = _datasets(run, used, tokenizer, report)
        if same_order(resumed, earlier[0]):
            datasets, instructions_text = earlier
    contents = cached_contents(run.data, report)
    return _prepared(begun, resolved, datasets, tokenizer, instructions_text or text, contents)


def _prepared(
    begun: Asked, resolved: ResolvedRun, datasets: Datasets, tokenizer: Tokenizer | None, text: str, contents: Contents
) -> Prepared:
    """The run with its data. text: a few words about them, without their epochs."""
    run, resumed = resolved.run, begun.paths.resumed
    needed, used = samples_asked(run, resumed), samples_used(run, resumed)
    samples = needed if needed > used >= (1 - UNTOLD) * needed else used
    text = f"{text}; {epochs_text(run, datasets, samples)}"
    saved = None if resumed is None else saved_run(resumed, run, contents)
    return Prepared(resolved, datasets, tokenizer, text, resumed, saved, len(begun.local_ranks), contents)


def _datasets(run: Run, needed: int, tokenizer: Tokenizer | None, report: Report) -> tuple[Datasets, str]:
    """Datasets with at least `needed` training samples, and a text about conversations; "" without any.

    `check_paths` has already compared the tokenizer with the one that the data record. Raises DataError.
    """
    valid = validation_samples(run)
    if run.data.instruction_data:
        return instruction_datasets(run, tokenizer, (needed, valid), report)
    assert run.model.vocab_size is not None, "validated: data without a tokenizer has --vocab-size"
    tested = run.trainer.test_iters * run.schedule.global_batch_size
    shares = [float(share) for share in run.data.split.split(",")]
    # Without a validation part in --split a run may validate on named sets only.
    elsewhere = bool(run.data.valid_data_path) and (len(shares) < 2 or shares[1] == 0)
    datasets = build_datasets(
        run.data,
        seq_length=run.model.seq_length,
        samples=(needed, 0 if elsewhere else valid, tested),
        vocab_size=run.model.vocab_size,
        named_samples=valid or None,
        report=report,
    )
    if len(datasets.train) == 0:
        raise DataError(f"--split {run.data.split} leaves no training samples of --seq-length {run.model.seq_length}")
    if run.trainer.test_iters and len(datasets.test) == 0:
        raise DataError(f"--test-iters {run.trainer.test_iters}: --split {run.data.split} leaves no test samples")
    return datasets, ""


def samples_asked(run: Run, resumed: FoundCheckpoint | None) -> int:
    """The number of training samples that the datasets are built for.

    As in Megatron-LM it is --train-samples, including a rest that fills no batch and is never used. The number of
    epochs, the shares of a blend and so the whole order of samples depend on it.
    """
    return samples_used(run, resumed) if run.schedule.train_samples is None else run.schedule.train_samples


def samples_used(run: Run, resumed: FoundCheckpoint | None) -> int:
    """The number of training samples consumed at the end of the run: the checkpoint's, and those of its own batches."""
    return StepPlan(run.schedule).consumed_at_end(*start_position(run, resumed))
