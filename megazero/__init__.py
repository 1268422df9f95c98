"""megazero: pretraining of GPT-, BLOOM- and LLaMA-style models.

`megazero.load(path)` opens a trained one; `megazero.checkpoint` is the format.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`megazero.load`, found when it is asked for: the ground that all rooms stand on imports none of them."""
    if name == "load":
        return import_module("megazero.convert.loading").load
    raise AttributeError(f"module 'megazero' has no attribute {name!r}")
