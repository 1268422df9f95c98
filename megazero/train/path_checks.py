"""Checks of the paths that a run names: places to write into, data, tokenizer and checkpoint. All problems are found in
one pass.

Nothing is written, tokenized or read to its end; the start of the run does that (`prepare`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megazero.checkpoint.folder import enclosing_checkpoint, list_checkpoints
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.manager import FoundCheckpoint, find
from megazero.checkpoint.resume_changes import SHAPE_STAYS, run_from
from megazero.config.dump import RUN_FILE
from megazero.config.schema import CheckpointConfig, Run
from megazero.config.source import ConfigError, problem_of
from megazero.convert.registry import recognise
from megazero.convert.source import ConversionError, NoCheckpoint
from megazero.data.build import parse_data_path, parse_valid_data_path
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.input_files import find_files
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.data.tokenizer_record import (
    path_of,
    recorded_flags,
    require_tokenizer_record,
    tokenizer_record,
)
from megazero.report.report_json import why_not_a_report
from megazero.report.trace_files import files_of, why_not_a_trace
from megazero.system.reading import listed, path_error
from megazero.system.writable import closed
from megazero.telemetry.metrics import why_not_a_metrics_file
from megazero.train.init_from import AdapterBase, base_of
from megazero.train.requirements import path_problems

NAMED = 3
"""Names of a folder's contents in a message."""


@dataclass(frozen=True)
class CheckedPaths:
    """The result of `check_paths`.

    tokenizer  the program's own or the run's; None without one, or if it cannot be opened
    resumed    the checkpoint that --load would resume from, if there is one
    base       the model that the adapters of the run belong to; None without adapters
    problems   one sentence for each problem
    """

    tokenizer: Tokenizer | None = None
    resumed: FoundCheckpoint | None = None
    base: AdapterBase | None = None
    problems: tuple[str, ...] = ()


def check_paths(run: Run, own_tokenizer: Tokenizer | None = None) -> CheckedPaths:
    """Check every path that the run names, each for itself. Opens files and reads their headers; communicates nothing.

    run: as the user asks for it. own_tokenizer: the program's tokenizer, used instead of the run's.
    """
    problems = [*unusable_places(run), *path_problems(run.offload)]
    tokenizer = _opened_data(run, own_tokenizer, problems)
    load, resumed, is_damaged = run.checkpoint.load, None, True
    with _collected(problems, f"--load {load}: "):
        newest = find(load) if load and not os.path.isfile(load) else None
        if newest is not None:
            run_from(newest.run)  # raises Damaged for a manifest whose run has impossible values
        resumed, is_damaged = newest, False
    if resumed is None and not is_damaged and load and os.path.exists(load):
        problems += _other_content(run.checkpoint, Path(load))
    problems += _of_another_run(run.checkpoint, resumed)
    if resumed is not None:
        problems += _without_optimizer(run, resumed)
    base = None
    if run.checkpoint.init_from or not is_damaged:  # the checkpoint of --load may say which model the base is
        with _collected(problems):
            base = base_of(run, resumed)
    return CheckedPaths(tokenizer, resumed, base, tuple(problems))


def missing_files(run: Run) -> tuple[str, ...]:
    """The problems of a run's paths, for the message about a run that has other problems too."""
    return check_paths(run).problems


def of_checkpoint(resumed: FoundCheckpoint, problems: Sequence[str]) -> list[str]:
    """The problems with the checkpoint's path, and where its settings are, if those of the model were forgotten."""
    file = resumed.path.parent / RUN_FILE
    forgotten = len(problems) > 1 and any(problem.endswith(SHAPE_STAYS) for problem in problems)
    sentences = [f"{resumed.path}: {problem}" for problem in problems]
    return sentences + [f"to go on with all settings of that run: --config {file}"] * (forgotten and file.is_file())


def _without_optimizer(run: Run, resumed: FoundCheckpoint) -> Iterator[str]:
    """A problem if the checkpoint lacks state of the optimizer that the run would go on with."""
    # Steps on disks may be later than the checkpoint, and take its place.
    if run.checkpoint.finetune or run.checkpoint.no_load_optim or run.offload.nvme_checkpoint:
        return
    tensors, moments = resumed.manifest.tensors.values(), run.optimizer.moments
    lacking = [column for column in moments if any(column not in tensor.columns for tensor in tensors)]
    if lacking:
        yield (
            f"--load {run.checkpoint.load}: {resumed.path} is without the optimizer's {' and '.join(lacking)} (saved "
            "with --no-save-optim, converted, or of another --optimizer), so no run can go on from it as it was; "
            "--no-load-optim goes on with its weights and position, --finetune starts with its weights, and "
            f"--init-from {resumed.path} in place of --load begins another run with them"
        )


def start_position(run: Run, resumed: FoundCheckpoint | None) -> tuple[int, int]:
    """The (iteration, consumed samples) that the run starts from."""
    if resumed is None or run.checkpoint.finetune:
        return 0, 0
    return int(resumed.progress["iteration"]), int(resumed.progress["consumed_samples"])


def checkpoints_in_the_way(cfg: CheckpointConfig, iteration: int) -> list[str]:
    """A note if --save holds checkpoints of later iterations than the run starts from; it will replace them.

    They are another run's, or the same run's from before it resumed from an earlier checkpoint.
    """
    checkpoints = [] if cfg.save is None else list_checkpoints(Path(cfg.save))
    if not checkpoints or checkpoints[-1][0] <= iteration:
        return []
    newest = checkpoints[-1][1]
    pruned = f", and --keep-last {cfg.keep_last} deletes those it has passed" if cfg.keep_last else ""
    return [
        f"--save {cfg.save} holds checkpoints up to {newest.name}, which this run does not start from: its own take "
        f"the place of those of the same iteration{pruned}; --load {newest} goes on from there"
    ]


def _of_another_run(cfg: CheckpointConfig, resumed: FoundCheckpoint | None) -> Iterator[str]:
    """A problem if --save holds checkpoints and this run starts from none of them, which would replace and delete them,
    or if it holds a model of another format.
    """
    if cfg.save is None or closed(cfg.save) is not None:
        return  # the outputs' checks tell why it is closed
    save = Path(cfg.save)
    checkpoints, format = list_checkpoints(save), "megazero"
    if not checkpoints:
        with suppress(ConversionError):  # it holds no model
            format = recognise(save)
    if format != "megazero":
        yield (
            f"--save {save}: holds a checkpoint of the format {format}, and with checkpoints of this run the folder "
            "could be read as two things: name another folder"
        )
    elif checkpoints and (
        resumed is None or save.resolve() not in (resumed.path.resolve(), *resumed.path.resolve().parents)
    ):
        yield (
            f"--save {cfg.save}: holds checkpoints up to {checkpoints[-1][1].name} of another run, which this run "
            f"would replace; to go on from them: --load {cfg.save}, to leave them: another --save"
        )


def _other_content(checkpoint: CheckpointConfig, load: Path) -> Iterator[str]:
    """A problem if --load, which holds no checkpoint, is a model of another format, or holds anything else than a run
    without one leaves behind: the name is a mistake, and the run would start from scratch.
    """
    try:
        format = recognise(load)
    except NoCheckpoint:
        format = None
    except ConversionError as error:
        yield problem_of(error, f"--load {path_error(load, error)}")
        return
    if format is not None:
        if format != "megazero":
            yield (
                f"--load {load}: is a checkpoint of the format {format}, from which no run can go on; --init-from "
                f"{load} starts with its weights"
            )
    elif load.is_dir() and not _same_place(load, checkpoint.save):  # the folder of --save may hold what it likes
        strange = sorted(name for name in os.listdir(load) if not name.startswith(".") and name != RUN_FILE)
        runs = [os.path.join(str(checkpoint.load), name) for name in strange if list_checkpoints(load / name)]
        nearest = f"; nearest: --load {' or '.join(runs[:NAMED])}" if runs else ""
        more = ", ..." * (len(strange) > NAMED)
        if strange:
            yield f"--load {checkpoint.load}: holds no checkpoint, but {listed(strange[:NAMED])}{more}{nearest}"


@contextmanager
def _collected(problems: list[str], before: str = "") -> Iterator[None]:
    """Turn an error of the block into an entry of `problems`, with `before` in front of its text."""
    try:
        yield
    except ImportError:
        pass  # `requirements` reports the package to install
    except ConfigError as error:
        problems += error.problems
    except (DataError, CheckpointError, ValueError, OSError) as error:
        problems.append(problem_of(error, f"{before}{error}"))


def _opened_data(run: Run, own_tokenizer: Tokenizer | None, problems: list[str]) -> Tokenizer | None:
    """Open the data that the run names, and return its tokenizer or the program's own; None without one, or if it
    cannot be opened. What is wrong, and each indexed dataset that records another tokenizer, is added to `problems`.
    """
    data, pairs = run.data, list[tuple[str, str]]()
    # The configuration's checks report a flag that cannot be parsed, and a tokenizer without its kind or path.
    with suppress(DataError):
        pairs += [("--data-path", prefix) for prefix in parse_data_path(data.data_path).prefixes]
    with suppress(DataError):
        pairs += [("--valid-data-path", prefix) for prefix in parse_valid_data_path(data.valid_data_path).values()]
    opened: list[tuple[str, Callable[[], object]]] = [(flag, partial(IndexedDataset, prefix)) for flag, prefix in pairs]
    opened += [("--instruction-data", partial(find_files, [name])) for name in data.instruction_data]
    opened += [("--valid-instruction-data", partial(find_files, [name])) for name in data.valid_instruction_data]
    for flag, open_data in opened:
        with _collected(problems, f"{flag}: "):
            open_data()
    kind, path, tokenizer = data.tokenizer, data.tokenizer_path, None
    with _collected(problems):
        if kind is None and path is not None and not os.path.exists(os.path.expanduser(path)):
            raise DataError(f"--tokenizer-path {path} is missing")
        if kind == "byte" or (kind is not None and path is not None):
            tokenizer = build_tokenizer(kind, path)
    recording = [(flag, prefix) for flag, prefix in pairs if path_of(prefix).exists()]
    if tokenizer is not None and recording:  # without the second nobody needs the hash of all tokens
        record = tokenizer_record(tokenizer, kind or "tokenizer")
        for flag, prefix in recording:
            with _collected(problems, f"{flag}: "):
                require_tokenizer_record(prefix, record)
    elif tokenizer is None and kind is None and run.model.vocab_size is None and own_tokenizer is None:
        recorded = recorded_flags([prefix for flag, prefix in pairs if flag == "--data-path"])
        problems += [] if recorded is None else [f"--data-path: {recorded}"]
    return own_tokenizer or tokenizer


def unusable_places(run: Run) -> list[str]:
    """Problems of the outputs and of --load, found before minutes of preparation.

    Nothing is written for a trial where a file system says enough: every rank makes these checks, and thousands of
    files at once would burden it. A problem that only a write shows is an error of that write.
    """
    load, save, metrics = run.checkpoint.load, run.checkpoint.save, run.trainer.metrics_file
    folders, problems = {"--save": save, "--tensorboard-dir": run.trainer.tensorboard_dir}, []
    if metrics and not os.path.lexists(metrics):
        folders["--metrics-file"] = os.path.dirname(metrics) or "."
    elif metrics and (reason := _unusable_metrics_file(metrics)) is not None:
        problems.append(f"--metrics-file {metrics}: {reason}")
    for flag, folder in folders.items():
        if folder and (reason := closed(folder)):
            problems.append(f"{flag} {path_error(folder, reason)}")
    if save and (reason := _inside_a_checkpoint(save)) is not None:
        problems.append(f"--save {save}: {reason}")
    if load and os.path.isfile(load):
        problems.append(f"--load {load}: is a file; name a folder of checkpoints")
    elif load and _is_missing(load) and not _same_place(load, save):
        problems.append(
            f"--load {load}: is not there; a run that may have to start from scratch names the same folder as --save"
        )
    return [*problems, *_unusable_predictions(run)]


def _unusable_metrics_file(path: str) -> str | None:
    """Why lines cannot be appended to what is there; None if they can."""
    if os.path.isdir(path):
        return "is a folder; name a file"
    if not os.path.exists(path):
        return "is a link, and nothing is where it leads"
    return why_not_a_metrics_file(path) if os.access(path, os.R_OK | os.W_OK) else "may not be read and written"


def _inside_a_checkpoint(save: str) -> str | None:
    """Why checkpoints cannot be saved here: what reads the folder would take it for one; None if they can."""
    place = Path(os.path.abspath(save))
    enclosing = enclosing_checkpoint(place)
    if enclosing is None:
        return None
    relation = "is a checkpoint" if os.path.exists(enclosing) else "has the name of a checkpoint"
    if enclosing != place:
        relation = f"lies in the checkpoint {enclosing}"
    return f"{relation}; name a folder of checkpoints, such as {enclosing.parent}"


def _is_missing(path: str) -> bool:
    """Whether nothing is there. A path that leads through a file is another problem, which opening it tells."""
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _same_place(path: str | Path, other: str | None) -> bool:
    return other is not None and os.path.realpath(path) == os.path.realpath(other)


def _unusable_predictions(run: Run) -> Iterator[str]:
    """Problems of --memory-trace with the JSON beside it, and of --report-json: each may only replace another file of
    its kind.
    """
    trainer = run.trainer
    taken = {os.path.abspath(trainer.metrics_file): "--metrics-file"} if trainer.metrics_file else {}
    for flag, name, why_not in (
        ("--memory-trace", trainer.memory_trace, why_not_a_trace),
        ("--report-json", trainer.report_json, why_not_a_report),
    ):
        if name is None:
            continue
        path = Path(name)
        if (reason := closed(str(path.parent))) is not None:
            yield f"{flag} {path_error(str(path.parent), reason)}"
            continue
        for file in files_of(path) if flag == "--memory-trace" else (path,):
            may_be_read = not file.is_file() or os.access(file, os.R_OK | os.W_OK)
            reason = why_not(file) if may_be_read else "may not be read"
            if other := taken.get(os.path.abspath(file)):
                reason = f"is the file of {other}"
            taken[os.path.abspath(file)] = flag
            if reason is not None:
                yield f"{flag} {path}: {file} {reason}" if file != path else f"{flag} {path}: {reason}"
