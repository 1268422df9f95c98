"""megazero: pretraining of GPT-, BLOOM- and LLaMA-style models.

`megazero.pretrain(run)` trains a model; with `megazero.training(run)` the caller takes the steps. `megazero.load(path)`
opens a trained model. `megazero.checkpoint` reads and writes checkpoints.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "ConfigError": "megazero.config.source",
    "Engine": "megazero.own.engine",
    "Model": "megazero.own.units.model",
    "Result": "megazero.train.api",
    "Rows": "megazero.data.own",
    "Run": "megazero.config.schema",
    "StepRecord": "megazero.telemetry.record",
    "StepValues": "megazero.telemetry.record",
    "Training": "megazero.train.api",
    "StepResult": "megazero.own.engine",
    "engine": "megazero.own.engine",
    "from_sequential": "megazero.own.units.model",
    "from_transformers": "megazero.own.transformers_models.cutting",
    "load": "megazero.convert.loading",
    "pretrain": "megazero.train.api",
    "saved_state_dict": "megazero.own.exported",
    "training": "megazero.own.loop.training",
}
"""The public names, and the modules that define them."""
__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Engine",
    "Model",
    "Result",
    "Rows",
    "Run",
    "StepRecord",
    "StepResult",
    "StepValues",
    "Training",
    "engine",
    "from_sequential",
    "from_transformers",
    "load",
    "pretrain",
    "saved_state_dict",
    "training",
]


def __getattr__(name: str) -> Any:
    """A name of `__all__`, imported on first use, because every room imports this package and it must import none."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'megazero' has no attribute {name!r}")
