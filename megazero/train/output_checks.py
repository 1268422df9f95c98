"""Checks of the places that a run writes into, and of --load, before minutes of preparation."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from megazero.checkpoint.folder import enclosing_checkpoint, list_checkpoints
from megazero.config.dump import RUN_FILE
from megazero.config.schema import CheckpointConfig, Run
from megazero.program.trace import files_of, why_not_a_trace
from megazero.system.reading import listed, path_error
from megazero.system.writable import closed
from megazero.telemetry.metrics import why_not_a_metrics_file

NAMED = 3
"""Names of a folder's contents in a message."""


def unusable_places(run: Run) -> list[str]:
    """Problems of the outputs and of --load, found before minutes of preparation.

    Nothing is written for a trial where a file system says enough: every rank makes these checks, and thousands of
    files at once would burden it. A problem that only a write shows is an error of that write.
    """
    load, metrics = run.checkpoint.load, run.trainer.metrics_file
    folders = {"--save": run.checkpoint.save, "--tensorboard-dir": run.trainer.tensorboard_dir}
    problems = []
    if metrics and os.path.isdir(metrics):
        problems.append(f"--metrics-file {metrics}: is a folder; name a file")
    elif metrics and os.path.exists(metrics):
        wrong = (
            why_not_a_metrics_file(metrics) if os.access(metrics, os.R_OK | os.W_OK) else "may not be read and written"
        )
        problems += [] if wrong is None else [f"--metrics-file {metrics}: {wrong}"]
    elif metrics and os.path.islink(metrics):
        problems.append(f"--metrics-file {metrics}: is a link, and nothing is where it leads")
    elif metrics:
        folders["--metrics-file"] = os.path.dirname(metrics) or "."
    problems += [
        f"{flag} {path_error(folder, wrong)}"
        for flag, folder in folders.items()
        if folder and (wrong := closed(folder))
    ]
    if run.checkpoint.save and (wrong := _inside_a_checkpoint(run.checkpoint.save)) is not None:
        problems.append(f"--save {run.checkpoint.save}: {wrong}")
    if load and os.path.isfile(load):
        problems.append(f"--load {load}: is a file; name a folder of checkpoints")
    elif load and _is_missing(load) and not _same_place(load, run.checkpoint.save):
        problems.append(
            f"--load {load}: is not there; a run that may have to start from scratch names the same folder as --save"
        )
    return [*problems, *_unusable_trace(run)]


def other_things(checkpoint: CheckpointConfig) -> Iterator[str]:
    """A problem if --load, which holds no checkpoint, holds anything else than a run without one leaves behind: the
    name is a mistake, and the run would begin from scratch. The folder of --save may hold what it likes.
    """
    load = checkpoint.load
    if load is None or not os.path.isdir(load) or _same_place(load, checkpoint.save):
        return
    inside = sorted(name for name in os.listdir(load) if not name.startswith("."))
    strange = [name for name in inside if name != RUN_FILE]
    if strange:
        runs = [os.path.join(load, name) for name in strange if list_checkpoints(Path(load, name))]
        nearest = f"; nearest: --load {' or '.join(runs[:NAMED])}" if runs else ""
        more = ", ..." * (len(strange) > NAMED)
        yield f"--load {load}: holds no checkpoint, but {listed(strange[:NAMED])}{more}{nearest}"


def _inside_a_checkpoint(save: str) -> str | None:
    """Why checkpoints cannot be saved here: what reads the folder would take it for one; None if they can."""
    place = Path(os.path.abspath(save))
    found = enclosing_checkpoint(place)
    if found is None:
        return None
    what = "is a checkpoint" if os.path.exists(found) else "has the name of a checkpoint"
    what = what if found == place else f"lies in the checkpoint {found}"
    return f"{what}; name a folder of checkpoints, such as {found.parent}"


def _is_missing(path: str) -> bool:
    """Whether nothing is there. A path that leads through a file is another problem, which opening it tells."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return False


def _same_place(one: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _unusable_trace(run: Run) -> Iterator[str]:
    """Problems of --memory-trace: it and the JSON beside it may only replace another trace."""
    if run.trainer.memory_trace is None:
        return
    path, metrics = Path(run.trainer.memory_trace), run.trainer.metrics_file
    if (wrong := closed(str(path.parent))) is not None:
        yield f"--memory-trace {path_error(str(path.parent), wrong)}"
        return
    for file in files_of(path):
        wrong = why_not_a_trace(file) if not file.is_file() or os.access(file, os.R_OK | os.W_OK) else "may not be read"
        if metrics and os.path.abspath(metrics) == os.path.abspath(file):
            wrong = "is the file of --metrics-file"
        if wrong is not None:
            yield f"--memory-trace {path}: {file} {wrong}" if file != path else f"--memory-trace {path}: {wrong}"
