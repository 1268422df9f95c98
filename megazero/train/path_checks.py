"""Whether what a run names is there: places to write into, data, tokenizer and checkpoint. All of it is looked at, and
told together.

Nothing is written, tokenized or read through: that is for the start of the run (`prepare`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.checkpoint.folder import listing
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.manager import FoundCheckpoint, find
from megazero.checkpoint.resume_changes import compare, run_from
from megazero.config.derive import with_vocabulary
from megazero.config.schema import CheckpointConfig, Run
from megazero.convert.registry import recognise
from megazero.convert.source import ConversionError
from megazero.data.build import parse_data_path, parse_valid_data_path
from megazero.data.documents import find_files
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.tokenizer import ListedTokenizer, Tokenizer, build_tokenizer
from megazero.data.tokenizer_record import path_of, require_tokenizer_record, tokenizer_record
from megazero.mpu.grid import axes_of
from megazero.system.reading import about
from megazero.telemetry.metrics import foreign


@dataclass(frozen=True)
class CheckedPaths:
    """What was found, and what is wrong with it.

    run        with the vocabulary and the separator of its tokenizer, where it names one that opens
    tokenizer  None without one, or where it does not open; the program's own where it hands one in
    found      the checkpoint that --load would resume from, if there is one
    """

    run: Run
    tokenizer: Tokenizer | None
    found: FoundCheckpoint | None
    problems: tuple[str, ...]


def check_paths(run: Run, world_size: int | None, own_tokenizer: Tokenizer | None = None) -> CheckedPaths:
    """Look at everything that the run names. Communicates nothing; files are opened and their headers read.

    world_size None: something else is wrong with the run. Each thing is then looked at by itself, and no checkpoint is
    compared with the run. own_tokenizer: one that a program hands in, in place of the run's.
    """
    problems: list[str] = [*_unusable_places(run), *_missing_data(run)]
    listed: ListedTokenizer | None = None
    found: FoundCheckpoint | None = None
    with _collected(problems):
        listed = _tokenizer(run)
    tokenizer = own_tokenizer or listed
    if tokenizer is not None:
        run = with_vocabulary(run, tokenizer.vocab_size, tokenizer.eod_id)
    if listed is not None:
        problems += _other_tokenizer(run, listed)
    with _collected(problems, f"--load {run.checkpoint.load}: "):
        found = find(run.checkpoint.load) if run.checkpoint.load and not os.path.isfile(run.checkpoint.load) else None
    if found is None and run.checkpoint.load:
        problems += _other_format(Path(run.checkpoint.load))
    opened = tokenizer is not None or run.data.tokenizer is None
    resolved = run.schedule.epochs is None  # else the length, and with it the rates, are not known before the data are
    if (
        world_size is not None
        and found is not None
        and opened
        and resolved
        and (run.data.data_path or run.data.instruction_data)
    ):
        problems += other_run(run, found, world_size)
    return CheckedPaths(run, tokenizer, found, tuple(problems))


def missing_files(run: Run) -> tuple[str, ...]:
    """What is wrong with what a run names, in which something else is wrong too: one message tells both."""
    return check_paths(run, None).problems


def other_run(run: Run, found: FoundCheckpoint, world_size: int) -> list[str]:
    """Why the run may not go on from this checkpoint, as far as the two runs tell."""
    comparison = compare(run_from(found.run), run, found.layout, asdict(axes_of(run.parallel, world_size)))
    return [f"{found.path}: {problem}" for problem in comparison.problems]


def starts_at(run: Run, found: FoundCheckpoint | None) -> tuple[int, int]:
    """(iteration, consumed samples) that the run starts from."""
    if found is None or run.checkpoint.finetune:
        return 0, 0
    return int(found.progress["iteration"]), int(found.progress["consumed_samples"])


def in_the_way(cfg: CheckpointConfig, iteration: int) -> list[str]:
    """That a run which starts at this iteration will come to checkpoints that are there already: another run's, or its
    own from before it went back.
    """
    later = [] if cfg.save is None else [path for number, path in listing(Path(cfg.save)) if number > iteration]
    if not later:
        return []
    pruned = f", and --keep-last-k {cfg.keep_last} deletes those it has passed" if cfg.keep_last else ""
    return [
        f"--save {cfg.save} holds checkpoints up to {later[-1].name}, which this run does not start from: its own take "
        "the place of those of "
        f"the same iteration{pruned}; --load {later[-1]} goes on from there"
    ]


def _other_format(load: Path) -> Iterator[str]:
    """A model that another program wrote would not be resumed but passed over, and the run start from scratch."""
    try:
        format = recognise(load)
    except ConversionError:
        return  # nothing is there that anybody knows
    if format != "megazero":
        yield (
            f"--load {load}: is a checkpoint of the format {format}, from which no run can go on; --init-from {load} "
            "starts with its weights"
        )


@contextmanager
def _collected(problems: list[str], before: str = "") -> Iterator[None]:
    """What cannot be opened becomes a problem like the others."""
    try:
        yield
    except ImportError:
        pass  # told by `requirements`, with what to install
    except (DataError, CheckpointError, ValueError, OSError) as error:
        problems.append(f"{before}{error}")


def _tokenizer(run: Run) -> ListedTokenizer | None:
    """The one that the run names, if it says which kind it is and where it lies: that something of this lacks, the
    configuration's checks tell.
    """
    kind, path = run.data.tokenizer, run.data.tokenizer_path
    if kind is None and path is not None and not os.path.exists(os.path.expanduser(path)):
        raise DataError(f"--tokenizer-path {path} is missing")
    return None if kind is None or (path is None and kind != "byte") else build_tokenizer(kind, path)


def _pairs(run: Run) -> dict[str, tuple[str, ...]]:
    """Prefixes by the flag that names them; none of words that are no list of them, which the configuration's checks
    tell.
    """
    found: dict[str, tuple[str, ...]] = {}
    with suppress(DataError):
        found["--data-path"] = parse_data_path(run.data.data_path).prefixes
    with suppress(DataError):
        found["--valid-data-path"] = tuple(parse_valid_data_path(run.data.valid_data_path).values())
    return found


def _other_tokenizer(run: Run, tokenizer: ListedTokenizer) -> list[str]:
    """Pairs whose ids are another tokenizer's, as far as they say."""
    problems: list[str] = []
    named = [
        (flag, prefix) for flag, prefixes in _pairs(run).items() for prefix in prefixes if path_of(prefix).exists()
    ]
    now = tokenizer_record(tokenizer, run.data.tokenizer or "tokenizer") if named else None
    for flag, prefix in named:
        assert now is not None
        with _collected(problems, f"{flag}: "):
            require_tokenizer_record(prefix, now)
    return problems


def _missing_data(run: Run) -> list[str]:
    problems: list[str] = []
    data = run.data
    for flag, prefixes in _pairs(run).items():
        for prefix in prefixes:
            with _collected(problems, f"{flag}: "):
                IndexedDataset(prefix)
    for flag, names in (
        ("--instruction-data", data.instruction_data),
        ("--valid-instruction-data", data.valid_instruction_data),
    ):
        for name in names:
            with _collected(problems, f"{flag}: "):
                find_files([name])
    return problems


def _unusable_places(run: Run) -> list[str]:
    """What the run would fail to write or to look into, found before minutes of preparation instead of after them.

    Only looked at, never tried: every rank comes through here, and thousands of trial files at once would hurt a file
    system. What a look cannot tell (a full disk) is an error when it is written.
    """
    load, metrics = run.checkpoint.load, run.trainer.metrics_file
    folders = {"--save": run.checkpoint.save, "--tensorboard-dir": run.trainer.tensorboard_dir}
    problems = []
    if metrics and os.path.isdir(metrics):
        problems.append(f"--metrics-file {metrics}: is a folder; name a file")
    elif metrics and os.path.exists(metrics):
        wrong = foreign(metrics) if os.access(metrics, os.R_OK | os.W_OK) else "may not be read and written"
        problems += [] if wrong is None else [f"--metrics-file {metrics}: {wrong}"]
    elif metrics and os.path.islink(metrics):
        problems.append(f"--metrics-file {metrics}: is a link, and nothing is where it leads")
    elif metrics:
        folders["--metrics-file"] = os.path.dirname(metrics) or "."
    problems += [
        f"{flag} {about(folder, wrong)}" for flag, folder in folders.items() if folder and (wrong := _closed(folder))
    ]
    if load and os.path.isfile(load):
        problems.append(f"--load {load}: is a file; name a folder of checkpoints")
    return problems


def _closed(folder: str) -> str | None:
    """Why nothing can be written into this folder, which may have to be made first; None: nothing speaks against it."""
    there = next(str(path) for path in (Path(folder), *Path(folder).absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written in"
