"""Preparation before any process group exists: data, tokenizer, and the manifest of the checkpoint to resume from.

Preparing the default corpus or an index can take minutes. No rank waits in a collective meanwhile, which could time
out: one process of a file system does the work, and the others wait for its file lock. Problems that are found here
are still configuration errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import Change, Comparison, compare
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.build import Datasets, build_datasets, cache_root, parse_data_path
from megazero.data.contents import Contents, cached_contents
from megazero.data.corpus import default_corpus
from megazero.data.indexed import DataError
from megazero.data.instructions import build_instructions
from megazero.data.own import OwnData, OwnSamples, own_datasets
from megazero.data.progress import Report, without_repeats
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.optim.step_plan import StepPlan
from megazero.system import device as devices
from megazero.system.words import counted
from megazero.train.checked import Asked, Where, asked_start, check_start
from megazero.train.epochs import epoch_of, epochs_text, own_epochs_text, samples_told
from megazero.train.path_checks import of_checkpoint, start_position
from megazero.train.resolve import DEFAULT_TOKENIZER, ResolvedRun, Vocabulary, resolve
from megazero.train.same_data import recorded_contents, saved_run


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
    local_world_size: int = 1
    contents: Contents = ()

    @property
    def run(self) -> Run:
        return self.resolved.run

    @property
    def changes(self) -> tuple[Change, ...]:
        """The differences from the run that wrote the checkpoint."""
        return () if self.resumed is None or self.saved is None else self._compared().changes

    def _compared(self) -> Comparison:
        assert self.resumed is not None and self.saved is not None
        return compare(self.saved, self.run, self.resumed.layout, self.resolved.axes.sizes)

    def problems(self) -> list[str]:
        """Why the run may not go on from the checkpoint, one sentence for each reason."""
        if self.resumed is None or self.saved is None:
            return []
        others = _other_data(self.run, self.saved, self.resumed, self.datasets, self.contents)
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
    begun = asked_start(asked, Where(world_size, local_ranks), own_data)
    problems = check_start(begun)
    if problems.machine or problems.others:
        raise ConfigError([*problems.machine, *problems.others])
    try:
        prepared = _named_data(begun, report) if own_data.train is None else _own_data(begun)
    except (DataError, ImportError) as error:  # ImportError: the data need a package, such as jinja2 for chats
        raise ConfigError([str(error)]) from error
    if against_resuming := prepared.problems():
        raise ConfigError(against_resuming)
    if prepared.resolved.kind == "cpu":
        _ = prepared.resolved.recompute  # a budget of activations that cannot be kept is known before ranks meet
    return prepared


def _own_data(begun: Asked) -> Prepared:
    """The data of a program."""
    own_data, run, resumed = begun.own_data, begun.resolved.run, begun.paths.resumed
    assert own_data.train is not None
    datasets = own_datasets(run, own_data, samples_used(run, resumed), validation_samples(run))
    epochs = own_epochs_text(samples_told(samples_asked(run, resumed), samples_used(run, resumed)), len(own_data.train))
    text = f"{counted(len(own_data.train), 'sample')} of the program's own; {epochs}"
    saved = None if resumed is None else saved_run(resumed, run, ())
    return Prepared(begun.resolved, datasets, begun.paths.tokenizer, text, resumed, saved, len(begun.where.local_ranks))


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
    resolved = begun.resolved if facts == begun.resolved.facts else resolve(asked, facts)
    run = resolved.run
    assert run.model.vocab_size is not None, "validated: data without a tokenizer has --vocab-size"
    datasets, text = _ordered_as(resumed, run, lambda samples: _datasets(run, samples, tokenizer, text, report))
    epochs = epochs_text(run, datasets, samples_told(samples_asked(run, resumed), samples_used(run, resumed)))
    contents = cached_contents(run.data, report)
    saved = None if resumed is None else saved_run(resumed, run, contents)
    local_world_size = len(begun.where.local_ranks)
    return Prepared(resolved, datasets, tokenizer, f"{text}; {epochs}", resumed, saved, local_world_size, contents)


def _ordered_as(
    resumed: FoundCheckpoint | None, run: Run, build: Callable[[int], tuple[Datasets, str]]
) -> tuple[Datasets, str]:
    """The datasets in the checkpoint's order of samples, if there is a checkpoint and one of two sizes gives its order.

    Datasets are built for `samples_asked`. Earlier versions built them for `samples_used`; if the checkpoint has the
    order of that size, it is used.

    build: returns datasets of at least a number of training samples, and a text about them.
    """
    asked, used = samples_asked(run, resumed), samples_used(run, resumed)
    made = build(asked)
    if resumed is not None and used != asked and not run.checkpoint.finetune and not _same_order(resumed, made[0]):
        other = build(used)
        if _same_order(resumed, other[0]):
            return other
    return made


def _datasets(run: Run, needed: int, tokenizer: Tokenizer | None, text: str, report: Report) -> tuple[Datasets, str]:
    """Datasets with at least `needed` training samples, and a text about them.

    `check_paths` has already compared the tokenizer with the one that the data record. Raises DataError.
    """
    assert run.model.vocab_size is not None
    valid = validation_samples(run)
    if run.data.instruction_data:
        assert tokenizer is not None, "validated: instruction data has --tokenizer"
        shape = {"seq_length": run.model.seq_length, "vocab_size": run.model.vocab_size}
        return build_instructions(run.data, tokenizer, **shape, samples=(needed, valid), report=report)
    datasets = build_datasets(
        run.data,
        seq_length=run.model.seq_length,
        samples=(
            needed,
            0 if _validates_elsewhere(run) else valid,
            run.trainer.test_iters * run.schedule.global_batch_size,
        ),
        vocab_size=run.model.vocab_size,
        named_samples=valid or None,
        report=report,
    )
    if len(datasets.train) == 0:
        raise DataError(f"--split {run.data.split} leaves no training samples of --seq-length {run.model.seq_length}")
    if run.trainer.test_iters and len(datasets.test) == 0:
        raise DataError(f"--test-iters {run.trainer.test_iters}: --split {run.data.split} leaves no test samples")
    return datasets, text


def samples_asked(run: Run, resumed: FoundCheckpoint | None) -> int:
    """The number of training samples that the datasets are built for.

    As in Megatron-LM it is --train-samples, including a rest that fills no batch and is never used. The number of
    epochs, the shares of a blend and so the whole order of samples depend on it.
    """
    return samples_used(run, resumed) if run.schedule.train_samples is None else run.schedule.train_samples


def samples_used(run: Run, resumed: FoundCheckpoint | None) -> int:
    """The number of training samples consumed at the end of the run: the checkpoint's, and those of its own batches."""
    return StepPlan(run.schedule).consumed_at_end(*start_position(run, resumed))


def validation_samples(run: Run) -> int:
    """Samples of one evaluation; each evaluation uses the same ones."""
    return run.trainer.eval_iters * run.schedule.global_batch_size


def _validates_elsewhere(run: Run) -> bool:
    """Whether the run validates on named sets only, because --split leaves no validation part."""
    shares = [float(share) for share in run.data.split.split(",")]
    return bool(run.data.valid_data_path) and (len(shares) < 2 or shares[1] == 0)


def _same_order(resumed: FoundCheckpoint, datasets: Datasets) -> bool:
    """Whether the order of samples is the checkpoint's. True if the checkpoint does not record one, as those of earlier
    versions for instruction data.
    """
    then = resumed.progress.get("data_plans")
    return not then or then == [list(plan) for plan in datasets.train.plans]


def _other_data(run: Run, saved: Run, resumed: FoundCheckpoint, datasets: Datasets, contents: Contents) -> list[str]:
    """A problem if the data of the same name are not the checkpoint's, or are read in another order."""
    names = (run.data.data_path, run.data.instruction_data), (saved.data.data_path, saved.data.instruction_data)
    if run.checkpoint.finetune or run.checkpoint.override_data or names[0] != names[1]:
        return []  # `compare` reports other names
    why = _other_documents(run, resumed, contents) or _other_order(run, resumed, datasets)
    repeated = "so samples would be repeated and left out; to go on all the same: --override-data"
    return [f"{why}, {repeated}"] if why else []


def _other_documents(run: Run, resumed: FoundCheckpoint, contents: Contents) -> str | None:
    """Which pair holds other documents than then. Their order may be the same by its numbers."""
    then = recorded_contents(resumed)
    if run.data.instruction_data or then is None or len(then) != len(contents) or then == contents:
        return None
    prefixes = parse_data_path(run.data.data_path).prefixes
    return "; ".join(
        f"--data-path {prefix} holds other documents than when the checkpoint was written ({before[0]:,} with "
        f"{before[1]:,} tokens then, {now[0]:,} with {now[1]:,} now"
        + ", as their checksum says" * (before[:2] == now[:2])
        + ")"
        for prefix, before, now in zip(prefixes, then, contents, strict=True)
        if before != now
    )


def _other_order(run: Run, resumed: FoundCheckpoint, datasets: Datasets) -> str | None:
    """In which way the order of samples is not the checkpoint's.

    A run of another length may need another number of epochs. Epochs are shuffled together, so all of the order
    changes. The order of conversations changes if the files have changed.
    """
    then, now = resumed.progress.get("data_plans") or [], [list(plan) for plan in datasets.train.plans]
    if _same_order(resumed, datasets):
        return None
    if run.data.instruction_data:
        return (
            f"--instruction-data {' '.join(run.data.instruction_data)} holds other conversations than when the "
            f"checkpoint was written ({then[0][0]:,} samples an epoch then, {now[0][0]:,} now)"
        )
    if isinstance(datasets.train, OwnSamples):
        return (
            f"train_data holds other samples than when the checkpoint was written ({then[0][0]:,} then, {now[0][0]:,} "
            "now, by number and checksum)"
        )
    before, epochs = (" ".join(str(plan[0]) for plan in plans) for plans in (then, now))
    return (
        f"--train-iters, --train-samples or other batches: "
        f"{counted(samples_asked(run, resumed), 'sample takes', 'samples take')} {epochs} "
        f"epoch{'' if epochs == '1' else 's'} of the data in another order than the checkpoint's {before}"
    )
