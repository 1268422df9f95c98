"""Pretraining as a function that a program calls, with its own data or its own loop. It never ends the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megazero.config.dump import program_source, read_yaml
from megazero.config.flags import fields_for_flags
from megazero.config.parse import ParsedArguments, ProgramSettings, parse_arguments
from megazero.config.schema import Run
from megazero.config.source import ConfigError, ConfigSource
from megazero.data.own import OwnData, Rows
from megazero.data.progress import silent, to_stderr
from megazero.data.tokenizer import Tokenizer
from megazero.launch import World, world_of
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.meeting import Environment
from megazero.system.extensions import why_not_called
from megazero.system.given import is_whole, kind
from megazero.system.reading import shown
from megazero.telemetry.record import StepRecord, StepValues, read_scalars
from megazero.telemetry.watchdog import StopSignals
from megazero.train.embedded import process_groups, rendezvous, result_on_all_ranks, settings_of_torch
from megazero.train.init_from import model_source
from megazero.train.job import build_job
from megazero.train.logs import Callbacks
from megazero.train.path_checks import missing_files
from megazero.train.prepare import Prepared, prepare
from megazero.train.same_run import require_same_run
from megazero.train.swap_files import FileUse
from megazero.train.trainer import Trainer

Given = Run | Mapping[str, Any] | str | os.PathLike[str]
"""The forms of a run that `pretrain` takes."""
__all__ = ["Result", "Training", "pretrain", "training"]


@dataclass(frozen=True)
class Result:
    """How a run has ended; the same on every rank.

    iteration, consumed_samples, consumed_tokens
                 how far the run is, counted from its first step, earlier calls that it resumes included
    finished     whether it has trained all its iterations or samples
    stopped_by   why it stopped before that, in words; None if it has finished
    loss         mean loss per token of the last step; None if this call took no step
    evaluations  losses of the newest evaluation by metric name: valid_loss, valid_loss/NAME, test_loss
    checkpoint   folder of the newest checkpoint that this call has saved; None if it has saved none
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    finished: bool
    stopped_by: str | None
    loss: float | None
    evaluations: dict[str, float]
    checkpoint: Path | None


class RunningJob(Protocol):
    """The parts of a run on this rank, as `train.job.Job` has them."""

    @property
    def run(self) -> Run: ...

    @property
    def grid(self) -> ProcessGrid: ...

    @property
    def trainer(self) -> Trainer: ...

    @property
    def disks(self) -> FileUse: ...

    def report(self) -> None: ...

    def close(self) -> None: ...


class Training:
    """A run whose steps are taken by the calling program.

    run         the resolved configuration
    rank        the rank of this process
    world_size  the number of ranks of the run
    """

    def __init__(self, job: RunningJob, signals: StopSignals) -> None:
        self.run, self.rank, self.world_size = job.run, job.grid.rank, job.grid.axes.world_size
        self._job: RunningJob | None = job
        self._signals = signals
        self._last: StepValues | None = None
        self._result: Result | None = None

    def steps(self) -> Iterator[StepValues]:
        """Train one step for each item taken. Evaluations and saves come at their intervals. The iterator ends when the
        run is finished or stops.

        The numbers of a step may be 0-dim tensors on the device: `float(step.loss)` waits for them. To leave the loop
        early, every rank must leave it after the same step; if one rank alone decides, it calls `stop` instead. A step
        is a collective, so every rank has to take it.
        """
        job = self._running()
        steps = job.trainer.steps()
        while True:
            with job.disks.counted():  # not the program's own time
                step = next(steps, None)
            if step is None:
                return
            self._last = step
            yield step

    def evaluate(self) -> dict[str, float]:
        """Evaluate now; return the mean losses of the validation sets by metric name. A collective of all ranks."""
        return self._running().trainer.evaluate()

    def stop(self, why: str = "its program asked for it") -> None:
        """Request a stop, on any rank. The reduction of the next step carries the request to all ranks. On a CPU that
        step is the last; on a GPU the run stops after the next step at which it logs.
        """
        self._signals.ask(why)

    @property
    def result(self) -> Result:
        """How the run has ended. Raises RuntimeError inside the `with` block."""
        if self._result is None:
            raise RuntimeError("the run goes on: its result is there after the `with` block")
        return self._result

    def finish(self) -> None:
        """Make the final evaluations, the last save and the report. A collective of all ranks."""
        trainer = self._running().trainer
        trainer.at_the_end()
        self._running().report()
        loss = None if self._last is None else read_scalars([self._last.loss])[0]
        newest = None if trainer.save_policy is None else trainer.save_policy.newest
        position, ending = trainer.position, trainer.ending
        progress = (position.iteration, position.consumed_samples, position.consumed_tokens)
        finished = ending.state == "finished"
        self._result = Result(*progress, finished, ending.reason or None, loss, dict(trainer.losses), newest)

    def _running(self) -> RunningJob:
        if self._job is None:
            raise RuntimeError("the run has ended with its `with` block")
        return self._job

    def release(self) -> None:
        """Stop the loaders' threads, close the job (`Job.close`), and drop the reference to it."""
        if self._job is not None:
            self._job.trainer.batches.close()
            self._job.close()
        self._job = None


class NotBegun(AbstractContextManager[Training]):
    """A run that `training` has made: a `with` block begins and ends it, and has the `Training`."""

    def __init__(self, run: AbstractContextManager[Training]) -> None:
        self._run = run

    def __enter__(self) -> Training:
        return self._run.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._run.__exit__(*raised)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the run has not begun, and has no {name}: `with megazero.training(...) as run:` begins it, and run has it"
        )


def training(
    run: Given,
    *,
    train_data: Rows | None = None,
    valid_data: Rows | Mapping[str, Rows] | None = None,
    tokenizer: Tokenizer | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
    on_evaluation: Callable[[int, dict[str, float]], object] | None = None,
    on_checkpoint: Callable[[Path, int], object] | None = None,
    handle_signals: bool = False,
) -> AbstractContextManager[Training]:
    """A run whose steps are taken by the caller:

        with megazero.training({"train_iters": 100}) as run:
            for step in run.steps():
                ...
        print(run.result)

    The arguments and errors are those of `pretrain`. When the block is left, also after a `break`, the run makes its
    last save and, if it has finished, its final evaluations. If an exception leaves the block, nothing is saved.
    """
    callbacks = Callbacks(on_step, on_evaluation, on_checkpoint)
    return NotBegun(_training(run, Arguments(train_data, valid_data, tokenizer, callbacks, handle_signals)))


@contextmanager
def _training(run: Given, arguments: Arguments) -> Iterator[Training]:
    """The run of `training`."""
    meeting = rendezvous()
    with settings_of_torch(meeting.environment):
        parsed, prepared, world = result_on_all_ranks(lambda: _prepared(run, arguments, meeting.environment), meeting)
        with naming_fields():
            require_same_run(prepared, meeting)
        with (
            StopSignals() if arguments.handle_signals else nullcontext(StopSignals()) as signals,
            process_groups(world, meeting, prepared.run.parallel) as grid,
        ):
            with naming_fields():
                job = build_job(prepared, grid, signals, parsed, arguments.callbacks)
            under_way = Training(job, signals)
            try:
                yield under_way
                under_way.finish()
            finally:
                under_way.release()


def pretrain(
    run: Given,
    *,
    train_data: Rows | None = None,
    valid_data: Rows | Mapping[str, Rows] | None = None,
    tokenizer: Tokenizer | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
    on_evaluation: Callable[[int, dict[str, float]], object] | None = None,
    on_checkpoint: Callable[[Path, int], object] | None = None,
    handle_signals: bool = False,
) -> Result:
    """Pretrain a model in this process, and return when the run has ended.

    Every rank makes the same call. If torch has a default process group (Ray Train makes one), its ranks are the ranks
    of the run, and the group stays as it is. Otherwise the ranks are the processes that torchrun started, or else this
    process alone. The run's own process groups are gone when the function returns. It may be called again.

    run             the path of a YAML file for `--config`, or a mapping of the same form; what it does not set has the
                    defaults of the command line. Or a `Run`, which is taken field by field
    train_data      samples to train on, instead of the data that the run names. Any object with a length whose item i
                    is `seq_length` + 1 token ids, the same on every rank (`megazero.Rows`). Sample i of the run is item
                    i modulo the length, in every layout. A resumed run goes on with the sample after its checkpoint; it
                    raises ConfigError if the number of items, or a checksum of 16 of them, has changed
    valid_data      the same for validation, or several by name; each needs at least `eval_iters` global batches
    tokenizer       object with `vocab_size`, `eod_id`, `encode` and `decode`, instead of the run's `tokenizer`
    on_step         called with a `StepRecord` for each step, at the log interval
    on_evaluation   called with the iteration and the losses by metric name
    on_checkpoint   called with the folder and the iteration of each complete checkpoint
    handle_signals  whether SIGTERM, SIGINT and SIGHUP stop the run with its state saved; main thread only

    A callback is called on each rank that gives one. If it returns True, the run stops as by `Training.stop`.

    Raises ConfigError, a ValueError whose `problems` list everything that is wrong, before it makes any process group;
    a problem of one rank is raised on all. After any other error the ranks may be out of step: end the processes.
    """
    callbacks = Callbacks(on_step, on_evaluation, on_checkpoint)
    with _training(run, Arguments(train_data, valid_data, tokenizer, callbacks, handle_signals)) as under_way:
        for _ in under_way.steps():
            pass
    return under_way.result


def _prepared(given: Given, arguments: Arguments, environment: Environment) -> tuple[ParsedArguments, Prepared, World]:
    """Resolve the run and prepare its data; communicates nothing. Raises ConfigError."""
    settings, problems = settings_of(given), arguments.problems()
    # With problems the settings are checked without the data, so that one error has the problems of both.
    own_data = OwnData() if problems else arguments.own_data()
    if own_data.tokenizer is not None:
        for name, value in (("vocab_size", own_data.tokenizer.vocab_size), ("eod_id", own_data.tokenizer.eod_id)):
            if settings.settings.get(name) is None:
                settings.put(name, None if value is None else int(value), "tokenizer")
    program = ProgramSettings(settings, arguments.train_data is not None)
    with naming_fields(problems):
        parsed = parse_arguments([], environment.world_size, model_source, missing_files, program)
    if problems:
        raise ConfigError(problems)
    with naming_fields():
        report = to_stderr if environment.local_rank == 0 else silent
        prepared = prepare(parsed.run, environment.world_size, report, own_data, environment.ranks_here)
        return parsed, prepared, world_of(prepared.run, environment)


@contextmanager
def naming_fields(others: Sequence[str] = ()) -> Iterator[None]:
    """Let a ConfigError name fields of the configuration, since the caller has given no flags, with these problems in
    front.
    """
    try:
        yield
    except ConfigError as error:
        problems = [*others, *map(fields_for_flags, error.problems)]
        raise ConfigError(problems, [*map(fields_for_flags, error.notes)]) from error.__cause__


def settings_of(given: Given) -> ConfigSource:
    """What a program has set. Raises ConfigError for what is no run."""
    if isinstance(given, str | os.PathLike):
        if not os.fspath(given):
            raise ConfigError(["run is empty: a Run, a mapping or the path of a YAML file is needed"])
        return read_yaml(Path(given), "run")
    if isinstance(given, Run | Mapping):
        return program_source(given, "the run")
    raise ConfigError([f"run is {type(given).__name__}, not a Run, a mapping or the path of a YAML file"])


TOKENIZER: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "vocab_size": ("a number from 1 on", lambda value: is_whole(value) and value >= 1),
    "eod_id": ("a number, or None where no token ends a document", lambda value: value is None or is_whole(value)),
    "encode": ("a method: text -> list of ids", callable),
    "decode": ("a method: list of ids -> text", callable),
}
"""The attributes that a tokenizer must have: what each must be, and a check of it."""
CALLBACKS = {
    "on_step": ("record",),
    "on_evaluation": ("iteration", "losses"),
    "on_checkpoint": ("folder", "iteration"),
}
"""The arguments with which each callback is called."""


@dataclass(frozen=True)
class Arguments:
    """The arguments as the caller gave them. They may have any type until `problems` has found nothing."""

    train_data: Any
    valid_data: Any
    tokenizer: Any
    callbacks: Callbacks
    handle_signals: Any
    named: str = "train_data"
    """What the caller calls the training data."""

    def problems(self) -> list[str]:
        """One sentence for each argument that cannot be used: its name, what it is, and what is needed."""
        problems = list[str]() if self.train_data is None else [*_rows_problems(self.named, self.train_data)]
        if isinstance(self.valid_data, Mapping):
            if not self.valid_data:
                problems.append("valid_data is an empty mapping, which names no validation set: None stands for none")
            for name, rows in self.valid_data.items():
                if not (isinstance(name, str) and name):
                    problems.append(f"valid_data has the key {shown(name)}: the name of a validation set is a word")
                problems += _rows_problems(f"valid_data[{name!r}]", rows)
        elif self.valid_data is not None:
            problems += _rows_problems("valid_data", self.valid_data)
        if self.tokenizer is not None:
            problems += _tokenizer_problems(self.tokenizer)
        for name, parameters in CALLBACKS.items():
            callback = getattr(self.callbacks, name)
            reason = None if callback is None else why_not_called(callback, *parameters)
            if reason is not None:
                problems.append(f"{name}: a function of {' and '.join(parameters)} is needed; {reason}")
        if not isinstance(self.handle_signals, bool):
            problems.append(f"handle_signals is {kind(self.handle_signals)}: it is True or False")
        elif self.handle_signals and threading.current_thread() is not threading.main_thread():
            problems.append("handle_signals: only the main thread of a program can handle signals, and this is another")
        return problems

    def own_data(self) -> OwnData:
        """The data and the tokenizer. Call it only if `problems` is empty."""
        valid = self.valid_data
        by_metric = {} if valid is None else {"valid_loss": valid}
        if isinstance(valid, Mapping):
            by_metric = {f"valid_loss/{name}": rows for name, rows in valid.items()}
        return OwnData(self.train_data, by_metric, self.tokenizer)


def _rows_problems(name: str, rows: object) -> Iterator[str]:
    needed = "a data set has a length and items by number (__len__ and __getitem__)"
    if isinstance(rows, str | bytes | os.PathLike):
        yield f"{name} is {kind(rows)}: {needed}; the run names files, by data.data_path"
    elif isinstance(rows, Mapping):
        yield f"{name} is {kind(rows)}, whose items have names: {needed}"
    elif lacking := [method for method in ("__len__", "__getitem__") if not hasattr(rows, method)]:
        yield f"{name} is {kind(rows)}: {needed}; it lacks {' and '.join(lacking)}"
    else:
        try:
            len(rows)  # type: ignore[arg-type]
        except TypeError as error:  # a class, an array without dimensions
            yield f"{name} is {kind(rows)}: {needed}; its length: {error}"


def _tokenizer_problems(tokenizer: object) -> Iterator[str]:
    lacking = []
    for name, (needed, fits) in TOKENIZER.items():
        if not hasattr(tokenizer, name):
            lacking.append(f"{name} ({needed})")
        elif not fits(value := getattr(tokenizer, name)):
            lacking.append(f"{name} ({needed}, not {kind(value)})")
    if isinstance(tokenizer, type):
        yield f"tokenizer is {kind(tokenizer)}: an object of it is needed"
    elif isinstance(tokenizer, str | os.PathLike):
        yield f"tokenizer is {kind(tokenizer)}: an object is needed; the run names one, by data.tokenizer"
    elif lacking:
        yield f"tokenizer is {kind(tokenizer)}, which lacks {', '.join(lacking)}"
