"""megazero: pretraining of GPT-, BLOOM- and LLaMA-style models.

`megazero.pretrain(run)` trains one, and `megazero.training(run)` lets the caller take the steps. `megazero.load(path)`
opens a trained one. `megazero.checkpoint` is the format.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "ConfigError": "megazero.config.source",
    "Result": "megazero.train.api",
    "Rows": "megazero.data.own",
    "Run": "megazero.config.schema",
    "StepRecord": "megazero.telemetry.record",
    "StepValues": "megazero.telemetry.record",
    "Training": "megazero.train.api",
    "load": "megazero.convert.loading",
    "pretrain": "megazero.train.api",
    "training": "megazero.train.api",
}
"""What a program needs, and where it is."""
__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Result",
    "Rows",
    "Run",
    "StepRecord",
    "StepValues",
    "Training",
    "load",
    "pretrain",
    "training",
]


def __getattr__(name: str) -> Any:
    """One of `__all__`, found when it is asked for: the ground that all rooms stand on imports none of them."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'megazero' has no attribute {name!r}")
