"""Swap files are opened: anew, or with the last whole step of an earlier process."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from megazero.disk.layout import SwapLayout
from megazero.disk.measure import weights_of
from megazero.disk.swap import SwapRecord, SwapSpace
from megazero.disk.swap_file import (
    CHECKPOINT,
    PREFIX,
    DiskError,
    SwapDamaged,
    SwapFile,
    owner_of,
    remove_leftovers,
    stem_of,
)
from megazero.disk.transports import DiskOptions


def open_swap(
    folders: Sequence[Path],
    pieces: Mapping[str, int],
    options: DiskOptions | None = None,
    *,
    job: str,
    rank: int = 0,
    slots: int = 2,
    again: Collection[str] = (),
    weights: tuple[float, ...] | None = None,
    resume: bool = False,
    step: int | None = None,
) -> SwapSpace:
    """The swap files of a rank, one in each folder.

    pieces   bytes by name, in the order of a step
    job      a word for the names of the files, the same for all ranks; two jobs that run at once have different ones
    slots    of each piece: with 2 `flip` makes a whole step of all that is written
    again    names of pieces with a slot more, for `SwapSpace.go_back`
    weights  of the folders; by default they are measured, where there are several
    resume   go on from the last whole step of an earlier process, if it has left one: `record` says which
    step     go on from this one of the two that the record has

    Leftover files of ended processes are removed, those of this job only without `resume`, and those of the job
    CHECKPOINT only by itself. Raises DiskError, and SwapDamaged for a step to resume from that is not whole.
    """
    options, folders = options or DiskOptions(), [Path(folder) for folder in folders]
    if not folders or len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"swap files need folders, each named once: {', '.join(map(str, folders)) or 'there is none'}")
    for folder in folders:
        remove_leftovers(folder, keep=job if resume else None)
        if job == CHECKPOINT and not resume:
            remove_leftovers(folder, jobs=job)
    stem = stem_of(job, rank)
    record_path = folders[0] / f"{stem}.json"
    newest = record_of(folders, job, rank) if resume else None
    record = None if newest is None else _back_to(newest, step, record_path)
    if record is not None:
        _assert_fits(record, pieces, len(folders), record_path)
        weights = record.weights
    weights = weights or weights_of(folders, options, slots * sum(pieces.values()))
    layout = SwapLayout(pieces, weights, slots, frozenset(again))
    files: list[SwapFile] = []
    try:
        for folder, size in zip(folders, layout.file_bytes, strict=True):
            files.append(SwapFile(folder / f"{stem}.bin", size, adopt=record is not None, stale=[record_path]))
        if record is not None and record.ids != tuple(file.id for file in files):
            raise SwapDamaged(f"{record_path}: is the record of other swap files than those beside it")
        for unfinished in folders[0].glob(f".{record_path.name}-*"):
            unfinished.unlink()  # of a process that was killed while it wrote a record
        if record is not None and record != newest:
            record.write(record_path)  # before the slots of the later step are written
        return SwapSpace(files, record_path, layout, options, record)
    except BaseException:
        for file in files:
            file.close(remove=record is None)
        raise


def remove_unused(folders: Sequence[Path], job: str, rank: int) -> None:
    """Remove a rank's swap files that this process has opened, or opens just now, unless they hold a whole step."""
    stem = stem_of(job, rank)
    if (folders[0] / f"{stem}.json").exists():
        return
    owners = (os.getpid(),) if job == CHECKPOINT else (os.getpid(), None)  # other jobs have names of their own
    for path in (folder / f"{stem}.bin" for folder in folders):
        if owner_of(path) in owners:
            path.unlink(missing_ok=True)


def record_of(folders: Sequence[Path], job: str, rank: int) -> SwapRecord | None:
    """The record that a process has left of this rank; None if there is none. Raises SwapDamaged."""
    path = Path(folders[0]) / f"{stem_of(job, rank)}.json"
    return SwapRecord.read(path) if path.exists() else None


def record_of_others(folders: Sequence[Path], job: str) -> tuple[Path, SwapRecord] | None:
    """The first record of a job in these folders, whatever rank's it is, and its path. Raises SwapDamaged."""
    paths = [path for folder in folders for path in sorted(Path(folder).glob(f"{PREFIX}{job}-*.json"))]
    return (paths[0], SwapRecord.read(paths[0])) if paths else None


def _back_to(record: SwapRecord, step: int | None, path: Path) -> SwapRecord:
    try:
        return record.back_to(step)
    except KeyError:
        raise DiskError(f"{path}: has no step {step}, but {' and '.join(map(str, record.steps))}") from None


def _assert_fits(record: SwapRecord, pieces: Mapping[str, int], folders: int, path: Path) -> None:
    if len(record.weights) != folders:
        raise DiskError(f"{path}: its step lies in {len(record.weights)} folders, not in {folders}")
    if list(record.pieces.items()) != list(pieces.items()):
        differing = sorted(set(record.pieces.items()) ^ set(pieces.items()))
        named = ", ".join(f"{name} ({count:,} bytes)" for name, count in differing[:4]) or "the order"
        raise DiskError(f"{path}: its step has other pieces than this run; they differ in {named}")
