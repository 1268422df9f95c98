"""The cache of compiled libraries. Of many processes that start together, one compiles a library."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fused_ops.native import compile as compiling
from fused_ops.native.compile import CompileError, Target, digest_file
from fused_ops.native.user_folders import own_temporary_folder, user_cache_folder

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What a file system without file locks says."""
INSTALLED = Path(__file__).resolve().parents[1] / "_kernels"


def find_or_build(target: Target) -> Path:
    """The path of the target's library: installed, in the cache, or compiled into the cache now.

    The cache has one library per compiler version. If this machine has no compiler, it uses a library of another one,
    which a shared cache may have. Raises CompileError if there is no library and none can be compiled.
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
        found = _writable(found)
    if not found.exists():
        with _locked(found.with_suffix(".lock")):
            if not found.exists():
                with tempfile.TemporaryDirectory(dir=found.parent) as work:
                    compiling.build([target], found.parent, Path(work))
    return found


def _writable(library: Path) -> Path:
    """This path in a folder that can be written: where the user's cache folder cannot be, one in the temporary folder.

    Raises OSError if neither can be written, or if the folder that cannot be was asked for by a variable.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        if os.access(library.parent, os.W_OK | os.X_OK):
            return library
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(library.parent))
    except OSError:
        temporary = own_temporary_folder()
        if os.environ.get("MEGAZERO_KERNEL_CACHE") or temporary is None:
            raise
        inside = temporary / "kernels" / library.relative_to(cache_folder())
        inside.parent.mkdir(parents=True, exist_ok=True)
        return inside


def cache_folder() -> Path:
    """The folder of kernels that are compiled at first use: $MEGAZERO_KERNEL_CACHE, else in the user's cache folder."""
    given = os.environ.get("MEGAZERO_KERNEL_CACHE")
    return Path(given) if given else user_cache_folder() / "kernels"


def _is_current(installed: Path, target: Target) -> bool:
    """Whether the installed library was made of these sources and flags. Sources may be edited in an editable install.

    Times of files say nothing: pip gives each file the time at which it unpacks it.
    """
    recorded = digest_file(installed)
    return recorded.exists() and recorded.read_text() == target.digest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock of the operating system, which is released when the process ends.

    A file system may have none. Then every process compiles for itself, in a folder of its own, and the last rename
    counts: all of them have the same library.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
