"""What a run leaves on disks, found from the folder of its --save, a folder around that, or its metrics file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.checkpoint.folder import list_checkpoints
from megazero.checkpoint.format import MANIFEST
from megazero.config.dump import RUN_FILE
from megazero.report.metrics_lines import MetricsLines, UnreadableRun, begins_as_metrics, begins_broken, read_metrics
from megazero.system.reading import Unreadable, listed
from megazero.system.yaml_file import load_yaml

Settings = Mapping[str, Mapping[str, Any]]
"""Section -> field -> value, as run.yaml has them."""
_NEITHER = "give the folder of --save, a folder around it, or the file of --metrics-file"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that lies in the folder of --save. time: when its manifest was written, in seconds since 1970."""

    iteration: int
    path: Path
    time: float


@dataclass(frozen=True)
class RunOnDisk:
    """What there is of a run.

    name      tells it from the other runs of a report
    metrics   of its metrics file
    written   when the metrics file was written last, in seconds since 1970
    folder    of its checkpoints; None if none is known
    saved     the checkpoints that are still there, oldest iteration first
    settings  of its run.yaml; None without one
    """

    name: str
    metrics: MetricsLines
    written: float
    folder: Path | None
    saved: tuple[Saved, ...]
    settings: Settings | None


def read_runs(paths: Sequence[Path]) -> list[RunOnDisk]:
    """The runs at these paths. Raises UnreadableRun."""
    found = [_find(path) for path in paths]
    files = [metrics.resolve() for metrics, _ in found]
    for number, file in enumerate(files):
        if file in files[:number]:
            raise UnreadableRun(f"{paths[number]} is the run of {paths[files.index(file)]}: {file} is of both")
    names = told_apart([folder or metrics for metrics, folder in found])
    return [_read(name, metrics, folder) for name, (metrics, folder) in zip(names, found, strict=True)]


def told_apart(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that differ from each other: `a` and `b`; of a single path its last two parts.

    Parts that all paths end with are left out where something is before them: `a/saved` and `b/saved` are `a` and `b`.
    """
    parts = [path.absolute().parts[1:] or path.absolute().parts for path in paths]
    shared = 0
    while len(parts) > 1 and all(
        len(each) > shared + 1 and each[-1 - shared] == parts[0][-1 - shared] for each in parts
    ):
        shared += 1
    ends = [each[: len(each) - shared] for each in parts]
    length = 1 if len(paths) > 1 else 2
    while len({end[-length:] for end in ends}) < len(ends) and length < max(map(len, ends)):
        length += 1
    return [os.path.join(*end[-length:]) for end in ends]


def _find(path: Path) -> tuple[Path, Path | None]:
    """(the metrics file, the folder of --save if it is known) of a path."""
    if not path.exists():
        raise UnreadableRun(f"{path} is not there: {_NEITHER}")
    if not path.is_dir():
        return path, _folder_of(path)
    if _is_saved_to(path):
        metrics = _metrics_of(path)
        if metrics is None:
            raise UnreadableRun(_no_metrics(path))
        return metrics, path
    runs = _runs_in(path)
    if len(runs) > 1:
        names = listed(folder or metrics for metrics, folder in runs)
        raise UnreadableRun(f"{path} holds several runs; name one: {names}")
    if not runs:
        saved_to = next((child for child in _folders_in(path) if _is_saved_to(child)), None)
        if saved_to is not None:
            raise UnreadableRun(_no_metrics(saved_to))
        broken = next(filter(begins_broken, sorted(path.glob("*.jsonl"))), None)
        if broken is not None:
            return broken, None  # and whoever reads it says how its first line is broken
        raise UnreadableRun(f"{path} is no folder of a run: {_NEITHER}")
    return runs[0]


def _runs_in(path: Path) -> list[tuple[Path, Path | None]]:
    """The runs that are directly in a folder: those of its folders, and metrics files that are of none of these."""
    runs = dict[Path, tuple[Path, Path | None]]()
    for folder in _folders_in(path):
        metrics = _metrics_of(folder) if _is_saved_to(folder) else None
        if metrics is not None:
            runs[metrics.resolve()] = metrics, folder
    for file in sorted(path.iterdir()):
        if file.is_file() and begins_as_metrics(file):
            runs.setdefault(file.resolve(), (file, None))
    return list(runs.values())


def _no_metrics(folder: Path) -> str:
    """Why the folder of --save leads to no metrics file."""
    named = _setting(_settings(folder), "trainer", "metrics_file")
    if named is None:
        known = (folder / RUN_FILE).is_file()
        why = "ran without --metrics-file, so its steps are recorded nowhere" if known else f"has no {RUN_FILE}"
        return f"{folder}: the run {why}; if there is a metrics file, name it in place of the folder"
    return f"{folder}: its --metrics-file {named} is not there any more; name the file where it is now"


def _folders_in(path: Path) -> Iterator[Path]:
    return (child for child in sorted(path.iterdir()) if child.is_dir() and not child.name.startswith("."))


def _is_saved_to(folder: Path) -> bool:
    return (folder / RUN_FILE).is_file() or bool(list_checkpoints(folder))


def _metrics_of(folder: Path) -> Path | None:
    """The metrics file that the run of a folder names, as it lies from here; None if it names none that is there.

    Both paths may be relative to a working folder that nobody knows now, and both may have been moved or copied
    together. So the way from one to the other is tried first.
    """
    settings = _settings(folder)
    metrics, save = (_setting(settings, *of) for of in (("trainer", "metrics_file"), ("checkpoint", "save")))
    if metrics is None:
        return None
    tried = [Path(metrics)]
    if save is not None and os.path.isabs(save) == os.path.isabs(metrics):
        tried.insert(0, Path(os.path.normpath(folder / os.path.relpath(metrics, save))))
    return next((path for path in tried if path.is_file()), None)


def _folder_of(metrics: Path) -> Path | None:
    """The folder beside a metrics file, or around it, whose run names the file."""
    around = metrics.absolute().parent
    for folder in (around, *_folders_in(around)):
        named = _metrics_of(folder) if (folder / RUN_FILE).is_file() else None
        if named is not None and named.resolve() == metrics.resolve():
            return metrics.parent / folder.relative_to(around)
    return None


def _settings(folder: Path) -> Settings | None:
    """The settings in a folder's run.yaml; None without the file. Raises UnreadableRun."""
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    try:
        content = load_yaml(path)
    except Unreadable as error:
        raise UnreadableRun(str(error)) from error
    if not isinstance(content, dict):
        raise UnreadableRun(f"{path} holds no settings of a run")
    return {section: fields for section, fields in content.items() if isinstance(fields, dict)}


def _setting(settings: Settings | None, section: str, name: str) -> str | None:
    value = (settings or {}).get(section, {}).get(name)
    return value if isinstance(value, str) else None


def _read(name: str, metrics: Path, folder: Path | None) -> RunOnDisk:
    saved = list_checkpoints(folder) if folder is not None else []
    checkpoints = [
        Saved(i, path, (path / MANIFEST).stat().st_mtime) for i, path in saved if (path / MANIFEST).is_file()
    ]
    written = metrics.stat().st_mtime
    settings = _settings(folder) if folder is not None else None
    return RunOnDisk(name, read_metrics(metrics), written, folder, tuple(checkpoints), settings)
