"""Preparation before any process group exists: data, tokenizer, and the manifest of the checkpoint to resume from.

Preparing the default corpus or an index can take minutes. No rank waits in a collective meanwhile, which could time
out: one process of a file system does the work, and the others wait for its file lock. Problems that are found here
are still configuration errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import Change, compare
from megazero.config.derive import with_vocabulary
from megazero.config.placement import applied
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.build import Datasets, build_datasets, cache_root, parse_data_path
from megazero.data.contents import Contents, cached_contents
from megazero.data.corpus import default_corpus
from megazero.data.indexed import DataError
from megazero.data.instructions import build_instructions
from megazero.data.own import OwnData, OwnSamples, own_datasets
from megazero.data.progress import Report, without_repeats
from megazero.data.tokenizer import ListedTokenizer, Tokenizer, build_tokenizer
from megazero.mpu.axes import axes_of
from megazero.optim.step_plan import StepPlan
from megazero.plan.order import order_within_budgets
from megazero.plan.recompute import recompute_table
from megazero.system import device as devices
from megazero.system.words import counted
from megazero.train.adapters import with_base
from megazero.train.epochs import epochs_text, own_epochs_text, samples_told, with_own_samples, with_samples
from megazero.train.path_checks import check_paths, of_checkpoint, start_position
from megazero.train.placed import rates_problems
from megazero.train.requirements import budget_problems, machine_problems, with_default_vocabulary
from megazero.train.same_data import recorded_contents, saved_run

DEFAULT_TOKENIZER = "gpt2"
DEFAULT_PROMPT = "import os\n\n\ndef "
"""The prompt of the final sample with the default corpus, which is Python source."""


@dataclass(frozen=True)
class Prepared:
    """A resolved run with its data.

    text     a few words about the data, for the banner
    found    the checkpoint that it resumes from, if there is one
    changes  the differences from the run that wrote the checkpoint
    contents what the training data hold, of data that the run names
    here     number of ranks of this host
    """

    run: Run
    datasets: Datasets
    tokenizer: Tokenizer | None
    text: str
    found: FoundCheckpoint | None
    changes: tuple[Change, ...]
    here: int = 1
    contents: Contents = ()


def prepare(
    run: Run, world_size: int, report: Report, own: OwnData | None = None, here: range | None = None
) -> Prepared:
    """Resolve the run and prepare its data, on every rank. Communicates nothing.

    report: called with lines about progress. own: data and tokenizer of a program, used instead of the run's. here: the
    ranks of this host; None: all ranks. Raises
    ConfigError for data or folders that cannot be used, for a checkpoint that the run may not resume from, and for a
    budget of activations that cannot be kept.
    """
    if run.trainer.deterministic:
        devices.use_deterministic_algorithms()
    own = own or OwnData()
    present = check_paths(run, world_size, own.tokenizer, here)
    run, tokenizer, found = present.run, present.tokenizer, present.found
    axes, kind = axes_of(run, world_size), devices.kind(run.parallel.device)
    if kind == "cpu":  # on a GPU the bodies of attention are tried later
        run = applied(run, order_within_budgets(with_default_vocabulary(run), axes, kind))
    unfit = budget_problems(run, world_size, tries_cards=False, here=here)
    problems = [*machine_problems(run), *present.problems, *own.problems(run), *unfit, *rates_problems(run)]
    if problems:
        raise ConfigError(problems)
    contents: Contents = ()
    try:
        if own.train is not None:
            run = with_own_samples(run, len(own.train), axes.dp)
            datasets = own_datasets(run, own, samples_used(run, found), validation_samples(run))
            epochs = own_epochs_text(samples_told(samples_asked(run, found), samples_used(run, found)), len(own.train))
            text = f"{counted(len(own.train), 'sample')} of the program's own; {epochs}"
        else:
            run, tokenizer, datasets, text = _named_data(run, tokenizer, found, axes.dp, report)
            contents = cached_contents(run.data, report)
    except (DataError, ImportError) as error:  # ImportError: the data need a package, such as jinja2 for chats
        raise ConfigError([str(error)]) from error
    changes = _changes(found, run, world_size, datasets, contents)
    run = with_base(run, found)
    if kind == "cpu":
        recompute_table(run, axes, kind)
    return Prepared(run, datasets, tokenizer, text, found, changes, world_size if here is None else len(here), contents)


def _named_data(
    run: Run, tokenizer: Tokenizer | None, found: FoundCheckpoint | None, dp: int, report: Report
) -> tuple[Run, Tokenizer | None, Datasets, str]:
    """Prepare the data that the run names: the run with its length, the tokenizer, the datasets, a text about them."""
    if not (run.data.data_path or run.data.instruction_data):
        run, tokenizer, text = _with_default_corpus(run, report)
    else:
        text = " ".join(run.data.data_path)
    assert run.model.vocab_size is not None, "validated: data without a tokenizer has --vocab-size"
    report = without_repeats(report)  # the data are opened to count their epochs, and again for the run
    run = with_samples(run, tokenizer, dp, report)
    datasets, text = _ordered_as(found, run, lambda samples: _datasets(run, samples, tokenizer, text, report))
    told = samples_told(samples_asked(run, found), samples_used(run, found))
    return run, tokenizer, datasets, f"{text}; {epochs_text(run, datasets, told)}"


def _with_default_corpus(run: Run, report: Report) -> tuple[Run, ListedTokenizer, str]:
    """The run with the default corpus, its tokenizer, and a text about it. Makes the corpus if it is missing."""
    corpus = default_corpus(cache_root(run.data), report)
    data = replace(
        run.data, data_path=(corpus.prefix,), tokenizer=DEFAULT_TOKENIZER, tokenizer_path=corpus.tokenizer_path
    )
    trainer = (
        run.trainer if run.trainer.sample_prompt is not None else replace(run.trainer, sample_prompt=DEFAULT_PROMPT)
    )
    tokenizer = build_tokenizer(DEFAULT_TOKENIZER, corpus.tokenizer_path)
    run = with_vocabulary(replace(run, data=data, trainer=trainer), tokenizer.vocab_size, tokenizer.eod_id)
    return run, tokenizer, corpus.description


def _ordered_as(
    found: FoundCheckpoint | None, run: Run, build: Callable[[int], tuple[Datasets, str]]
) -> tuple[Datasets, str]:
    """The datasets in the checkpoint's order of samples, if there is a checkpoint and one of two sizes gives its order.

    Datasets are built for `samples_asked`. Earlier versions built them for `samples_used`; if the checkpoint has the
    order of that size, it is used.

    build: returns datasets of at least a number of training samples, and a text about them.
    """
    asked, used = samples_asked(run, found), samples_used(run, found)
    made = build(asked)
    if found is not None and used != asked and not run.checkpoint.finetune and not _same_order(found, made[0]):
        other = build(used)
        if _same_order(found, other[0]):
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


def samples_asked(run: Run, found: FoundCheckpoint | None) -> int:
    """The number of training samples that the datasets are built for.

    As in Megatron-LM it is --train-samples, including a rest that fills no batch and is never used. The number of
    epochs, the shares of a blend and so the whole order of samples depend on it.
    """
    return samples_used(run, found) if run.schedule.train_samples is None else run.schedule.train_samples


def samples_used(run: Run, found: FoundCheckpoint | None) -> int:
    """The number of training samples consumed at the end of the run: the checkpoint's, and those of its own batches."""
    return StepPlan(run.schedule).consumed_at_end(*start_position(run, found))


def validation_samples(run: Run) -> int:
    """Samples of one evaluation; each evaluation uses the same ones."""
    return run.trainer.eval_iters * run.schedule.global_batch_size


def _validates_elsewhere(run: Run) -> bool:
    """Whether the run validates on named sets only, because --split leaves no validation part."""
    shares = [float(share) for share in run.data.split.split(",")]
    return bool(run.data.valid_data_path) and (len(shares) < 2 or shares[1] == 0)


def _changes(
    found: FoundCheckpoint | None, run: Run, world_size: int, datasets: Datasets, contents: Contents
) -> tuple[Change, ...]:
    if found is None:
        return ()
    saved = saved_run(found, run, contents)
    comparison = compare(saved, run, found.layout, axes_of(run, world_size).sizes)
    problems = [*comparison.problems, *_other_data(run, saved, found, datasets, contents)]
    if problems:
        raise ConfigError(of_checkpoint(found, problems))
    return comparison.changes


def _same_order(found: FoundCheckpoint, datasets: Datasets) -> bool:
    """Whether the order of samples is the checkpoint's. True if the checkpoint does not record one, as those of earlier
    versions for instruction data.
    """
    then = found.progress.get("data_plans")
    return not then or then == [list(plan) for plan in datasets.train.plans]


def _other_data(run: Run, saved: Run, found: FoundCheckpoint, datasets: Datasets, contents: Contents) -> list[str]:
    """A problem if the data of the same name are not the checkpoint's, or are read in another order."""
    names = (run.data.data_path, run.data.instruction_data), (saved.data.data_path, saved.data.instruction_data)
    if run.checkpoint.finetune or run.checkpoint.override_data or names[0] != names[1]:
        return []  # `compare` reports other names
    why = _other_documents(run, found, contents) or _other_order(run, found, datasets)
    repeated = "so samples would be repeated and left out; to go on all the same: --override-data"
    return [f"{why}, {repeated}"] if why else []


def _other_documents(run: Run, found: FoundCheckpoint, contents: Contents) -> str | None:
    """Which pair holds other documents than then. Their order may be the same by its numbers."""
    then = recorded_contents(found)
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


def _other_order(run: Run, found: FoundCheckpoint, datasets: Datasets) -> str | None:
    """In which way the order of samples is not the checkpoint's.

    A run of another length may need another number of epochs. Epochs are shuffled together, so all of the order
    changes. The order of conversations changes if the files have changed.
    """
    then, now = found.progress.get("data_plans") or [], [list(plan) for plan in datasets.train.plans]
    if _same_order(found, datasets):
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
        f"{counted(samples_asked(run, found), 'sample takes', 'samples take')} {epochs} "
        f"epoch{'' if epochs == '1' else 's'} of the data in another order than the checkpoint's {before}"
    )
