"""`main` of the megazero of this clone, for its scripts where none is installed."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def _load(package: str) -> None:
    """Import a package of this clone, wherever Python looks for packages."""
    spec = spec_from_file_location(package, Path(__file__).resolve().parents[1] / package / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules[package] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


for _package in ("fused_ops", "megazero"):
    _load(_package)

from megazero.cli.main import main  # noqa: E402 - it is there now

__all__ = ["main"]
