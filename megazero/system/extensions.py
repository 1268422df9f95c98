"""Additions of installed packages to tables of this program, by entry points.

A package names its addition in its pyproject.toml. So every rank finds it, and no program has to register anything:

    [project.entry-points."megazero.lr_decay_styles"]
    sawtooth = "my_package.schedules:sawtooth"

A run that asks for a name which is built in and added is refused. A package's code is imported only when a run uses it.
"""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

LR_DECAY_STYLES = "megazero.lr_decay_styles"
"""Values of --lr-decay-style: functions from an `optim.lr_schedule.Decay` to the learning rate (float)."""
SINKS = "megazero.sinks"
"""Values of --sinks: functions from a `telemetry.sinks.SinkContext` to a `telemetry.record.Sink`."""

FAMILIES = "megazero.families"
"""Values of model_type in a config.json: functions from the model_type to a `convert.hf.tables.Family`."""


def names(group: str) -> tuple[str, ...]:
    """The names that installed packages add to this group."""
    return tuple(sorted(_added(group).names))


def load(group: str, name: str) -> Any:
    """The function or class of that name, which takes one argument. Raises ValueError if no package or several packages
    have it, its import fails, or it cannot be called so.
    """
    points = list(_added(group).select(name=name))
    if len(points) != 1:
        values = ", ".join(point.value for point in points) or "no installed package"
        raise ValueError(f"{name} of {group} is given by {values}")
    try:
        loaded = points[0].load()
    except Exception as error:  # whatever the other package does when it is imported
        raise ValueError(f"{name} of {group} ({points[0].value}): {type(error).__name__}: {error}") from error
    against = why_not_called(loaded, "argument")
    if against is not None:
        raise ValueError(
            f"{name} of {group} ({points[0].value}): a function or class of one argument is needed; {against}"
        )
    return loaded


def refuse_twin(group: str, name: str) -> None:
    """Raises ValueError where a package adds what megazero has itself: somebody expects the one or the other."""
    twins = ", ".join(point.value for point in _added(group).select(name=name))
    if twins:
        raise ValueError(
            f"megazero has its own {name}, and an installed package another ({twins}): rename the package's"
        )


def _added(group: str) -> EntryPoints:
    return _installed(group, tuple(sys.path))


@lru_cache(maxsize=8)
def _installed(group: str, _folders: tuple[str, ...]) -> EntryPoints:
    """What packages in these folders, which are sys.path, add to this group. Kept, because a run asks six times, and
    reading takes 5 ms where few packages are installed.
    """
    return entry_points(group=group)


def why_not_called(function: object, *words: str) -> str | None:
    """Why something cannot be called with these arguments; None where it can, or does not say what it takes."""
    if not callable(function):
        return f"this is {type(function).__name__}"
    if inspect.iscoroutinefunction(function):
        return "this is a coroutine function, which nobody awaits"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as some functions of C
        return None
    try:
        signature.bind(*words)
    except TypeError as error:
        return f"this cannot be called so ({error})"
    return None
