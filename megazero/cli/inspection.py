"""What `megazero inspect` does."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megazero.checkpoint.format import CheckpointError
from megazero.cli.exit_status import status_of
from megazero.cli.inspection_text import format_description, format_difference
from megazero.config.options import did_you_mean
from megazero.convert.comparison import compare, compared_bytes
from megazero.convert.inspection import (
    Inspected,
    Record,
    checkpoints_in,
    contents,
    holds_adapters,
    is_ours,
    open_for_inspection,
    open_merged,
    tensor_statistics,
)
from megazero.convert.names import missing_path_message
from megazero.convert.source import ConversionError
from megazero.data.progress import Progress, to_stderr
from megazero.system.status import FAILED

NEAREST = 3
"""The most similar names that the error for an unknown tensor offers."""


class UsageError(Exception):
    """A mistake in the arguments."""


@dataclass
class ByteProgress:
    """Counts bytes that have been read, and reports them as progress."""

    progress: Progress
    done: int = 0

    def __call__(self, more: int) -> None:
        self.done += more
        self.progress.reach(self.done / 1e6)


def counting(what: str, total: int) -> ByteProgress:
    return ByteProgress(Progress(to_stderr, what, total / 1e6, "MB"))


def open_inspected(path: Path, format: str | None) -> Inspected:
    if not os.path.exists(path):
        raise UsageError(missing_path_message(path))
    if format is None and path.is_dir() and not any(path.iterdir()):
        raise UsageError(f"{path} is empty")
    return open_for_inspection(path, format)


def describe(args: argparse.Namespace) -> tuple[Record, list[str]]:
    """(the record of one checkpoint, its problems)."""
    inside = checkpoints_in(args.path) if is_ours(args.path) else []
    record: Record = {"checkpoints": inside}
    try:
        inspected = open_inspected(args.path, args.format)
    except (CheckpointError, ValueError) as error:
        if not inside:
            raise
        told = str(error)
        return record, [*_problems(inside, lambda name, problem: name in told and problem in told), told]
    found: list[str] = []
    with inspected:
        record |= contents(inspected)
        if args.tensor:
            names = [name for name in inspected.tensors.shapes if name == args.tensor or fnmatchcase(name, args.tensor)]
            if not names:
                hint = did_you_mean(args.tensor, inspected.tensors.shapes, NEAREST)
                raise UsageError(
                    f"--tensor {args.tensor}: none of the {len(inspected.tensors.shapes)} tensors is called so{hint} "
                    f"(megazero inspect {args.path} lists them)"
                )
            record["statistics"] = {name: tensor_statistics(inspected, name) for name in names}
        if args.verify:
            reading = counting(f"reading {inspected.path}", inspected.nbytes)
            found = inspected.verify(args.threads, reading)
            record["verified"] = {"bytes": reading.done, "hashes": inspected.manifest is not None, "problems": found}
            if inspected.source is not None:
                record["report"] = inspected.source.report.lines()
        problems = _problems(inside, lambda name, problem: name == inspected.path.name and problem in found) + found
    return record, problems


def _problems(inside: list[Record], told: Callable[[str, str], bool]) -> list[str]:
    """The problems of a folder's checkpoints, without those that are told as a checkpoint's own (its name, problem)."""
    named = ((entry["name"], entry["problem"]) for entry in inside if entry["problem"])
    return [f"{name}: {problem}" for name, problem in named if not told(name, problem)]


def print_description(args: argparse.Namespace) -> int:
    """Print the result and return the status. Raises UsageError, CheckpointError, ValueError, OSError."""
    if args.other is None:
        record, problems = describe(args)
        if args.json:
            print(json.dumps(record | {"problems": problems}))
        else:
            print(format_description(record, args.all))
        for problem in problems:
            print(f"damaged: {problem}", file=sys.stderr)
        return FAILED if problems else 0
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_inspected(path, args.format)) for path in (args.path, args.other))
        if holds_adapters(first) != holds_adapters(second):
            first, second = (
                stack.enter_context(open_merged(each)) if holds_adapters(each) else each for each in (first, second)
            )
        record = compare(first, second, counting("comparing", compared_bytes(first, second)))
    print(json.dumps(record) if args.json else format_difference(record, args.all))
    return FAILED if args.exit_code and not record["identical"] else 0


def run(args: argparse.Namespace) -> int:
    """As `print_description`; an error becomes a line on stderr and a status."""
    return status_of(
        lambda: print_description(args), (UsageError, ConversionError), failures=(CheckpointError, ValueError)
    )
