"""One conversion from start to end. It is checked before it begins, and written under a temporary name until it is
whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megazero.checkpoint.folder import enclosing_run
from megazero.checkpoint.narrowing import OutOfRange
from megazero.convert.companions import read_contents, write_companions
from megazero.convert.formats import Format, TargetOptions
from megazero.convert.layout import layout_problems
from megazero.convert.source import WEIGHT, ConversionError, Source
from megazero.data.progress import Progress, Report
from megazero.system.durable import sync_folder
from megazero.system.writable import closed
from megazero.telemetry.units import duration

SPARE = 1.02
"""The size of a target over the bytes of its tensors, at most: it has headers, pickles and padding too."""


def convert(source: Source, target: Format, output: Path, options: TargetOptions, report: Report) -> None:
    """Write a source as another format into the new folder `output`. The folder appears whole or not at all.

    report: called with lines about the progress. Memory: a few tensors. Raises ConversionError before anything is
    written if the target format cannot hold the model, the output exists, or the disk is too small. Raises OSError if
    writing fails; what was written is deleted then.
    """
    source = source if target.part is None else target.part(source)
    output = Path(os.path.realpath(output))  # a link stays one, and what it leads to gets the checkpoint
    check_conversion(source, target, output, options)
    began, total = time.monotonic(), _bytes_read(source, target)
    size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    progress = Progress(report, f"{source.format} -> {target.name}", total / size, unit)
    assert target.write is not None
    with _becoming(output) as temporary:
        try:
            target.write(source, temporary, options, lambda count: progress.reach(progress.done + count / size))
        except OutOfRange as error:
            raise ConversionError(error.nearest("--dtype")) from error
        if not target.has_companions:
            write_companions(read_contents(source.companions, source.report.notes.append), temporary)
    seconds = max(time.monotonic() - began, 1e-9)
    report(
        f"{source.format} -> {target.name}: {total / size:,.1f} {unit} in {duration(seconds)} "
        f"({total / size / seconds:,.1f} {unit}/s)"
    )


def _bytes_read(source: Source, target: Format) -> int:
    columns = source.columns if target.has_optimizer else (WEIGHT,)
    return sum(entry.nbytes(column) for entry in source.entries.values() for column in columns)


def check_conversion(source: Source, target: Format, output: Path, options: TargetOptions) -> None:
    """Raise one ConversionError that lists every reason against a conversion."""
    problems = []
    if target.write is None:
        problems.append(f"--to {target.name}: this format is read only")
    if options.quantized is not None and options.quantized not in target.quantizes:
        problems.append(f"--dtype {options.quantized}: {target.name} has no such blocks of integers; --to gguf has")
    problems += _layout_problems(source, target, options)
    there = os.path.lexists(output)
    if os.path.exists(output) and (not output.is_dir() or any(output.iterdir())):
        problems.append(f"--output {output}: is there already; nothing is overwritten")
    above = next(path for path in output.absolute().parents if os.path.exists(path))
    if not above.is_dir():
        problems.append(f"--output {output}: {above} is a file")
    elif (wrong := closed(str(output.parent if there else _unfinished(output)))) is not None:
        problems.append(f"--output {output}: {wrong}")
    else:
        problems += _too_small(source, target, output, options)
    if (run := enclosing_run(output.absolute().parent)) is not None:
        problems.append(f"--output {output}: {run} is a folder of a run's checkpoints; name a place outside of it")
    if problems:
        raise ConversionError("; ".join(problems))


def _layout_problems(source: Source, target: Format, options: TargetOptions) -> list[str]:
    """Why the target cannot have the layout that was asked for."""
    asked = {"--tp": options.tp, "--pp": options.pp, "--dp": options.dp}
    problems = [f"{flag} {size}: must be at least 1" for flag, size in asked.items() if size < 1]
    if problems:
        return problems
    if not target.has_layout and (options.tp, options.pp) != (1, 1):
        problems.append(f"--tp {options.tp} --pp {options.pp}: {target.name} has no layout; its files open on any")
    if options.dp > 1 and not (target.has_layout and target.has_optimizer):
        problems.append(f"--dp {options.dp}: {target.name} has no files per data-parallel rank")
    return [*problems, *layout_problems(source.model, tp=options.tp, pp=options.pp)]


def _too_small(source: Source, target: Format, output: Path, options: TargetOptions) -> list[str]:
    """The problem of a disk that has too little room for the output, in a list; else the list is empty."""
    needed = _bytes_read(source, target) * SPARE
    if options.dtype is not None:
        stored = sum(entry.nbytes() for entry in source.entries.values())
        needed -= stored - sum(entry.numel * options.dtype.itemsize for entry in source.entries.values())
    there = next(path for path in output.absolute().parents if path.is_dir())
    free = shutil.disk_usage(there).free
    return (
        []
        if needed <= free
        else [f"--output {output}: about {needed / 1e9:,.1f} GB will be written, {free / 1e9:,.1f} GB are free there"]
    )


def _unfinished(output: Path) -> Path:
    """The folder that is written, until it is whole and gets its name."""
    return output.with_name(f".{output.name}.converting")


@contextmanager
def _becoming(output: Path) -> Iterator[Path]:
    """A temporary folder to write into. It gets the name `output` once it is complete.

    It removes the remains of a conversion that was killed. It refuses to start while another conversion writes there.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = _unfinished(output)
    with open(output.with_name(f".{output.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConversionError(f"--output {output}: another conversion is writing there") from error
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            _sync(temporary)
            if output.is_dir():
                output.rmdir()  # empty: `check_conversion` has looked
            temporary.rename(output)
            sync_folder(output.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.unlink(lock.name)


def _sync(folder: Path) -> None:
    """Sync all files of a folder to the disk, before the folder is renamed."""
    for root, _, files in os.walk(folder):
        for name in files:
            handle = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_folder(Path(root))
