"""Kernels on the block products of other processors than this machine's. They are compiled once, with a replacement of
torch's product (stand_in.h).
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from fused_ops import products
from fused_ops.native import compile as compiling
from fused_ops.native import library
from fused_ops.native.binding import Library
from fused_ops.native.cache import find_or_build
from fused_ops.native.compile import Target
from fused_ops.native.library import suffix

STAND_IN = Path(__file__).with_name("stand_in.h")
PROCESSORS: Mapping[str, dict[str, str]] = MappingProxyType(
    {
        "AMX-FP16": {"BF16": "pairs", "FP16": "pairs"},
        "AVX512-FP16 without AMX-FP16": {"BF16": "pairs", "FP16": "rows"},
        "AVX512-BF16": {"BF16": "pairs", "FP16": "none"},
        "AVX-512": {"BF16": "none", "FP16": "none"},
    }
)
"""Name -> the layout of the right operand that its product of each type takes, as in oneDNN of torch 2.11 to 2.13."""
_numbers = itertools.count()


def kernels_of(folder: Path, habits: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library of kernels over a product with these layouts (type -> layout), with static variables of its own."""
    base = library.cpu_library("auto")
    if base is None:
        pytest.skip("no compiler, no kernels")
    version = hashlib.sha256(STAND_IN.read_bytes()).hexdigest()[:16]
    stands_in = f"'-DMZ_BORROWED=\"{STAND_IN}\"'", f"-DMZ_STAND_IN=0x{version}"
    quickly = "-O1"  # two thirds of the time of -O3
    flags = (*compiling.FLAGS, quickly, *compiling.WARNINGS, *compiling.LEVELS[base.level], *stands_in)
    own = shutil.copyfile(
        find_or_build(Target(f"stand_in_{base.level}", "torch", flags)), folder / f"{next(_numbers)}.so"
    )
    for kind in ("FP32", "BF16", "FP16"):
        monkeypatch.delenv(f"BLOCK_PRODUCT_{kind}", raising=False)
    for kind, habit in habits.items():
        monkeypatch.setenv(f"BLOCK_PRODUCT_{kind}", habit)
    return Library(Path(own), base.level)


def on_processor(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Make the ops use the kernels over the products of a processor of `PROCESSORS`, and torch's products for the
    dtypes that it has.
    """
    made, habits = kernels_of(folder, PROCESSORS[name], monkeypatch), PROCESSORS[name]
    monkeypatch.setattr(products, "_has_products", lambda dtype: habits[suffix(dtype).upper()] != "none")
    replacement: Callable[[str], Library | None] = lambda asked: None if asked == "reference" else made  # noqa: E731
    monkeypatch.setattr(library, "torch_library", replacement)
    return made
