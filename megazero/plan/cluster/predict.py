"""Predictions for the rows of a table of runs: the seconds of a step and the memory of the fullest rank."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megazero.config.parse import parse_run
from megazero.config.source import ConfigError, ConfigSource
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import Hardware
from megazero.plan.cluster.table_rows import missing_columns, run_of_row


def predictions(path: Path, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """A dictionary for each row of a CSV file, in its order: `seconds` of a step, `memory_bytes` of the fullest rank,
    and whether it `fits` a device; or the `error` of a row that says too little, or describes no legal run. Lines that
    begin with # are comments. Raises ConfigError for what is no table, or one without rows or a column that each needs.
    """
    for row in _rows(path):
        try:
            step = step_of_row(row, hardware)
        except (ConfigError, ValueError) as error:
            problems = error.problems if isinstance(error, ConfigError) else (str(error),)
            yield {"error": "; ".join(problems)}
        else:
            yield {"seconds": step.seconds, "memory_bytes": step.memory_bytes, "fits": step.fits}


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--predict {path}: {getattr(error, 'strerror', None) or 'is no text'}"]) from None
    told = [line for line in lines if line.strip() and not line.startswith("#")]
    names = ",".join(name.strip().lower() for name in told[0].split(",")) if told else ""
    try:
        table = csv.DictReader([names, *told[1:]])
        rows = list(table)
    except csv.Error as error:
        raise ConfigError([f"--predict {path}: {error}"]) from None
    if not rows:
        raise ConfigError([f"--predict {path}: has no rows below a line of names"])
    if twice := [name for name, number in Counter(table.fieldnames or ()).items() if name and number > 1]:
        raise ConfigError([f"--predict {path}: has several columns {', '.join(twice)}"])
    if missing := missing_columns(table.fieldnames or ()):
        raise ConfigError([f"--predict {path}: has no column {', no '.join(missing)}; commas stand between names"])
    return rows


def step_of_row(row: Mapping[str, str], hardware: Hardware) -> ClusterStep:
    """The step of a row. Where it leaves settings open: the fastest that fits, else that with the least memory. Raises
    ConfigError.
    """
    said = run_of_row(row)
    cluster = hardware.cluster(said.gpu, said.gpus, said.nodes_of, said.interconnect)
    runs = (parse_run(words, said.gpus, _unread) for words in said.choices)
    steps = [ClusterStep(run, cluster, said.program) for run in runs]
    if len(steps) == 1:
        return steps[0]
    fitting = [step for step in steps if step.fits]
    return min(fitting, key=lambda step: step.seconds) if fitting else min(steps, key=lambda step: step.tensors)


def _unread(path: str) -> ConfigSource:
    return ConfigSource(path, unread=True)
