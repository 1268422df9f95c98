"""Where compiled libraries are kept, and how many processes that start together compile one only once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fused_ops.native import compile as compiling
from fused_ops.native.compile import CompileError, Target

INSTALLED = Path(__file__).resolve().parents[1] / "_kernels"


def find_or_build(target: Target) -> Path:
    """Where the target's library lies: installed, in the cache, or compiled into the cache now (once, whoever starts
    together).

    The cache holds a library per compiler. Without one, another machine's serves, where the cache is shared.
    """
    installed = INSTALLED / f"{target.name}.so"
    if installed.exists() and _is_current(installed, target):
        return installed
    folder = cache_folder() / target.digest()
    try:
        version = compiling.compiler_version(compiling.compiler(target.compiler))
    except CompileError:
        if others := sorted(folder.glob(f"*/{target.name}.so")):
            return others[0]
        raise
    found = folder / hashlib.sha256(version.encode()).hexdigest()[:8] / f"{target.name}.so"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        with _locked(found.with_suffix(".lock")):
            if not found.exists():
                with tempfile.TemporaryDirectory(dir=found.parent) as work:
                    compiling.build([target], found.parent, Path(work))
    return found


def cache_folder() -> Path:
    """Where kernels compiled at first use are kept: $MEGAZERO_KERNEL_CACHE, else under the user's cache folder."""
    given = os.environ.get("MEGAZERO_KERNEL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(base) / "megazero" / "kernels"


def _is_current(installed: Path, target: Target) -> bool:
    """Not so where somebody works on the sources of an editable install."""
    made = installed.stat().st_mtime
    return all(path.stat().st_mtime <= made for path in target.inputs)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The kernel's own file lock: it goes with the process that holds it, so none is ever stale."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
