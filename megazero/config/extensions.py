"""Additions of installed packages to tables of this program, by entry points.

A package names its addition in its pyproject.toml. So every rank finds it, and no program has to register anything:

    [project.entry-points."megazero.lr_decay_styles"]
    sawtooth = "my_package.schedules:sawtooth"

A built-in name has precedence over an added one. A package's code is imported only when a run uses it.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

LR_DECAY_STYLES = "megazero.lr_decay_styles"
"""Values of --lr-decay-style: functions from an `optim.lr_schedule.Decay` to the learning rate (float)."""
SINKS = "megazero.sinks"
"""Values of --sinks: functions from a `telemetry.sinks.SinkContext` to a `telemetry.record.Sink`."""


def names(group: str) -> tuple[str, ...]:
    """The names that installed packages add to this group."""
    return tuple(sorted({found.name for found in entry_points(group=group)}))


def load(group: str, name: str) -> Any:
    """The object of that name. Raises ValueError if no package or several packages have it, or its import fails."""
    found = list(entry_points(group=group, name=name))
    if len(found) != 1:
        values = ", ".join(point.value for point in found) or "no installed package"
        raise ValueError(f"{name} of {group} is given by {values}")
    try:
        return found[0].load()
    except Exception as error:  # whatever the other package does when it is imported
        raise ValueError(f"{name} of {group} ({found[0].value}): {type(error).__name__}: {error}") from error
