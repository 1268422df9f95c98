"""--report-json: a run's report as one JSON object, written before the first step or by --validate-only.

docs/reference/run-report.md describes its keys.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.config.tiers import TierShare
from megazero.report.run_report import RunReport
from megazero.system.durable import replace_file
from megazero.system.writable import why_not_replaced

KIND = "megazero run report"
_HEAD = 64
"""The first bytes of a file, in which the kind is."""


def report_object(report: RunReport) -> dict[str, Any]:
    """The report as JSON has it."""
    return {"kind": KIND} | {("settings" if key == "run" else key): value for key, value in _plain(report).items()}


def write_report(report: RunReport) -> None:
    """Write the file of --report-json, if the run has the flag. Raises ConfigError if it cannot be written."""
    if report.run.trainer.report_json is None:
        return
    path = Path(os.path.realpath(report.run.trainer.report_json))  # a link stays, and leads to the new report
    content = json.dumps(report_object(report), indent=1, allow_nan=False) + "\n"
    try:
        if (wrong := why_not_a_report(path)) is not None:
            raise FileExistsError(wrong)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.encode(), uuid4().hex)
    except OSError as error:
        raise ConfigError([f"--report-json {report.run.trainer.report_json}: {error}"]) from error


def why_not_a_report(path: Path) -> str | None:
    """Why a report may not be written to this path, as `system.writable.why_not_replaced` says it."""
    return why_not_replaced(path, KIND, _HEAD, "report of a run")


def _plain(value: Any) -> Any:
    """A value of a report as JSON has it; a number that is not finite is null, as in the metrics file."""
    if isinstance(value, Run):
        return _plain(run_dict(value))
    if is_dataclass(value) and not isinstance(value, TierShare):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
