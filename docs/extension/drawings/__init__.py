"""Pictures of what the code does, made by calling it: each is a function of a few numbers that gives SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from docs.extension.drawings.batch import batch
from docs.extension.drawings.buckets import buckets
from docs.extension.drawings.curves import learning_rates, loss
from docs.extension.drawings.grid import grid
from docs.extension.drawings.house import house
from docs.extension.drawings.plan import plan
from docs.extension.drawings.samples import packing, windows
from docs.extension.drawings.schedule import schedule, schedules
from docs.extension.drawings.shards import boxes, files
from docs.extension.drawings.step import step
from docs.extension.drawings.tiers import tiers

DRAWINGS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {
        "house": house,
        "grid": grid,
        "schedule": schedule,
        "schedules": schedules,
        "step": step,
        "tiers": tiers,
        "boxes": boxes,
        "buckets": buckets,
        "batch": batch,
        "packing": packing,
        "files": files,
        "windows": windows,
        "learning-rates": learning_rates,
        "loss": loss,
        "plan": plan,
    }
)


def argument(word: str) -> tuple[str, int | str]:
    """`tp=2` as ("tp", 2), `name=zb-v` as ("name", "zb-v"). Raises ValueError."""
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"{word!r} is not name=value")
    return name, int(value) if value.isdigit() else value
