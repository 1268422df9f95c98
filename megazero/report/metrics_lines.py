"""A metrics file as columns: what docs/reference/metrics.md describes, read line by line."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

from megazero.system.reading import BOUNDS, Unreadable, json_type, open_file, parse_json, shown

INTEGERS = "iteration", "consumed_samples", "consumed_tokens", "global_batch_size", "peak_memory_bytes"
NUMBERS = (
    *INTEGERS,
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "step_seconds",
    "tokens_per_second",
    "model_tflops_per_rank",
    "hardware_tflops_per_rank",
    "mfu",
)
"""The keys of a step that are read, besides `skipped`. A line may have others."""
_LONGEST = BOUNDS.settings
"""Bytes of a line: evaluations of thousands of named sets fit."""
_STEP = {"loss", "skipped"}
"""What a step has and an evaluation has not."""
_EVALUATED = "valid_loss", "test_loss"


class UnreadableRun(ValueError):
    """There are no metrics at a path, or they cannot be read. The message says where and why."""


@dataclass(frozen=True)
class Evaluation:
    """A line of an evaluation. row: the step before it, as an index of the columns; -1 if there is none."""

    iteration: int
    row: int
    losses: Mapping[str, float]


@dataclass(frozen=True)
class MetricsLines:
    """A metrics file.

    path         of the file
    columns      key of `NUMBERS` -> a number for each step in the order of the lines; NaN for null and for a key that
                 the line lacks. Keys that no line has are absent
    skipped      rows of steps that changed nothing
    evaluations  in the order of the lines
    torn         whether the last line ends in its middle, as while it is written
    """

    path: Path
    columns: Mapping[str, array[float]]
    skipped: tuple[int, ...]
    evaluations: tuple[Evaluation, ...]
    torn: bool

    @property
    def steps(self) -> int:
        return len(self.columns["iteration"])


@dataclass
class _Columns:
    """Columns while lines are read."""

    values: dict[str, array[float]] = field(default_factory=lambda: {key: array("d") for key in NUMBERS})
    skipped: list[int] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def take(self, record: Mapping[str, Any], where: str) -> None:
        row = len(self.values["iteration"])
        if not record.keys() >= _STEP:
            losses = {key: _number(record, key, where) for key in record if key.startswith(_EVALUATED)}
            if not losses:
                raise UnreadableRun(f"{where} has neither the loss of a step nor that of an evaluation")
            self.evaluations.append(Evaluation(record["iteration"], row - 1, losses))
            return
        for key, column in self.values.items():
            column.append(_number(record, key, where))
        if record["skipped"]:
            self.skipped.append(row)


def read_metrics(path: Path) -> MetricsLines:
    """Read a metrics file, which a run may be writing. Raises UnreadableRun, with the number of a line."""
    columns, torn = _Columns(), False
    for number, line, is_whole in _lines(path):
        where = f"{path}, line {number},"
        try:
            record = parse_json(line.decode(), where)
        except (Unreadable, UnicodeDecodeError) as error:
            if not is_whole and (number > 1 or BEGINNING.startswith(line[: len(BEGINNING)])):
                torn = True
                break
            words = "is no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).removeprefix(f"{where} ")
            raise UnreadableRun(f"{where} {words}: {shown(line)}") from None
        if not isinstance(record, dict) or type(record.get("iteration")) is not int:
            torn = not is_whole
            if torn:
                break
            raise UnreadableRun(f"{where} is no line of a metrics file: it has no whole number `iteration`")
        columns.take(record, where)
    present = {
        key: column for key, column in columns.values.items() if key in INTEGERS[:1] or any(map(isfinite, column))
    }
    return MetricsLines(path, present, tuple(columns.skipped), tuple(columns.evaluations), torn)


def begins_as_metrics(path: Path) -> bool:
    """Whether the first line of a file is one of a metrics file, or the file has its ending and is empty, as that of a
    run which has just begun. False for what cannot be read.
    """
    try:
        with open_file(path) as file:
            begins = file.read(len(BEGINNING))
            return begins == BEGINNING or (not begins and path.suffix == ".jsonl")
    except (Unreadable, OSError):
        return False


def begins_broken(path: Path) -> bool:
    """Whether the first line of a file is no JSON. False for a file that is empty or cannot be read."""
    try:
        _, line, _ = next(_lines(path), (0, b"null", True))
        parse_json(line.decode(), str(path))
    except UnreadableRun:
        return False
    except (Unreadable, UnicodeDecodeError):
        return True
    return False


BEGINNING = b'{"iteration": '


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number from 1, line, whether it ends with a newline). Raises UnreadableRun."""
    try:
        with open_file(path) as file:
            number = 0
            while line := file.readline(_LONGEST + 1):
                number += 1
                if len(line) > _LONGEST:
                    raise UnreadableRun(f"{path}, line {number}, has more than {_LONGEST:,} bytes: no metrics file has")
                yield number, line.removesuffix(b"\n"), line.endswith(b"\n")
    except (Unreadable, OSError) as error:
        raise UnreadableRun(str(error)) from error


def _number(record: Mapping[str, Any], key: str, where: str) -> float:
    """A number of a line; NaN for null, for what is not finite, and where the key is missing."""
    value = record.get(key)
    if value is None:
        return nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableRun(f"{where} has {json_type(value)} as `{key}`, not a number: {shown(value)}")
    return float(value) if isfinite(value) else nan
