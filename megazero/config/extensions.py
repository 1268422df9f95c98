"""What other installed packages add to a table of ours: entry points, found when somebody asks for them.

A package names its addition in its pyproject.toml. So every rank knows it, and no program has to register
anything:

    [project.entry-points."megazero.lr_decay_styles"]
    sawtooth = "my_package.schedules:sawtooth"

A name of ours wins over an added one. Nothing is imported before a run asks for it by name.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

LR_DECAY_STYLES = "megazero.lr_decay_styles"
"""Functions `optim.lr_schedule.Decay -> float`, the rate: values of --lr-decay-style."""
SINKS = "megazero.sinks"
"""Functions `telemetry.sinks.Opening -> telemetry.record.Sink`: values of --sinks."""


def names(group: str) -> tuple[str, ...]:
    """What installed packages add to this group."""
    return tuple(sorted({found.name for found in entry_points(group=group)}))


def load(group: str, name: str) -> Any:
    """The object of that name. Raises ValueError where it is not there, is there twice, or cannot be imported."""
    found = list(entry_points(group=group, name=name))
    if len(found) != 1:
        values = ", ".join(point.value for point in found) or "no installed package"
        raise ValueError(f"{name} of {group} is given by {values}")
    try:
        return found[0].load()
    except Exception as error:  # whatever the other package does when it is imported
        raise ValueError(f"{name} of {group} ({found[0].value}): {type(error).__name__}: {error}") from error
