"""Folders that are built once per file system and then only read.

All ranks call `build_once`. The first to get the file lock builds the folder under a temporary name, syncs and renames
it. The others wait for the lock, report what they wait for, and find the finished folder. If the builder dies, the next
rank gets the lock. No collective is used, so nothing can time out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_ops.native.user_folders import own_temporary_folder, user_cache_folder
from megazero.data.file_array import DataError, FileArray, OpenFile
from megazero.data.progress import Report
from megazero.system.durable import sync_folder
from megazero.system.reading import BOUNDS, Unreadable, read_object
from megazero.telemetry.units import duration, size

FORMAT = 1
FACTS = "facts.json"
SAY_EVERY = 5.0
SEAL = "seal"
PAGE = 512
"""Words of 8 bytes that are summed together."""
WEIGHTS = np.arange(PAGE, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C14) | np.uint64(1)
"""Weights of the words of a page. They are odd, so that a change of one word always changes the sum modulo 2^64, and
different, so that the order of words matters.
"""
AT_ONCE = 1 << 20
"""Bytes that are read and summed at once: whole pages that fit into a core's cache."""

Arrays = dict[str, FileArray]


def default_root() -> Path:
    """Where orders of data and the default corpus are kept if no folder is named."""
    return user_cache_folder()


def key_of(what: str, facts: dict[str, Any]) -> str:
    """Name of a cache folder: a hash of all facts that determine its contents."""
    text = json.dumps({"format": FORMAT, "what": what, **facts}, sort_keys=True)
    return f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def build_once(
    root: Path,
    name: str,
    build: Callable[[Path, Report], None],
    report: Report,
    complete: Callable[[Path], bool] = Path.is_dir,
) -> Path:
    """The folder root/name, built by build(temporary folder, report) unless it exists and is `complete`.

    Where the default root cannot be written, a folder in the system's temporary one takes its place on this host.
    Raises DataError where a root that was asked for, or both, cannot be written or locked.
    """
    folder = root / name
    if complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f"{name}.lock", "a+")  # noqa: SIM115 - closed below
    except OSError as error:
        temporary = own_temporary_folder() if root == default_root() else None
        if temporary is None:
            raise DataError(f"--data-cache-path {root}: {error.strerror}; name a folder that can be written") from error
        instead = temporary / "data"
        if not instead.is_dir():  # told once: the folder's second content, and later runs, are silent
            report(f"{root}: {error.strerror}; {instead} takes its place, and --data-cache-path names another folder")
        return build_once(instead, name, build, report, complete)
    with lock, _held(lock.fileno(), name, report):
        if complete(folder):
            return folder

        def say(text: str) -> None:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}: {text}")
            lock.flush()
            report(text)

        if folder.exists():
            report(f"{folder} is damaged or of another version, and is built again")
        _build(root, folder, build, say, complete)
    return folder


@contextlib.contextmanager
def _held(handle: int, name: str, report: Report) -> Iterator[None]:
    """Hold the lock. It is polled, so that a waiting rank can report what the builder has written into its file."""
    start = said = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            now = time.monotonic()
            if now - said >= SAY_EVERY:
                said = now
                note = os.pread(handle, 4096, 0).decode(errors="replace")
                report(f"waiting {duration(now - start)} for {name}: {note}")
            time.sleep(0.05)
        except OSError as error:
            raise DataError(
                f"--data-cache-path: this file system gives no file locks ({error.strerror}); name another folder"
            ) from error
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


def _build(
    root: Path, folder: Path, build: Callable[[Path, Report], None], report: Report, complete: Callable[[Path], bool]
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.unfinished-", dir=root))
    try:
        temporary.chmod(0o755)
        build(temporary, report)
        for path in temporary.rglob("*"):
            if path.is_file():
                with open(path, "rb") as written:
                    os.fsync(written.fileno())
        sync_folder(temporary)
        if folder.exists():  # it is not complete
            folder.rename(temporary.with_name(f"{temporary.name}-old"))
        try:
            temporary.rename(folder)
        except OSError:
            if not complete(folder):  # a network file system may show another machine's finished folder late
                raise
        sync_folder(root)
    except OSError as error:  # numpy's message about a full disk gives numbers of elements only
        free, name = shutil.disk_usage(root).free, folder.name
        raise DataError(
            f"{name} cannot be written to {root}, where {size(free)} are free ({error}); --data-cache-path chooses "
            "another"
        ) from error
    finally:
        for left in (temporary, temporary.with_name(f"{temporary.name}-old")):
            shutil.rmtree(left, ignore_errors=True)


def cached_arrays(
    root: Path, what: str, facts: dict[str, Any], build: Callable[[Report], dict[str, NDArray]], report: Report
) -> Arrays:
    """Arrays that are determined by `facts`, in .npy files of the cache.

    Files that are missing or not as they were written are built again. A process that has old files open goes on
    reading them. Raises DataError as `once` does.
    """

    def write(folder: Path, say: Report) -> None:
        arrays = build(say)
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", np.ascontiguousarray(values))
        shapes = {name: [list(values.shape), values.dtype.str] for name, values in arrays.items()}
        sums = {name: _sum(OpenFile(folder / f"{name}.npy")) for name in arrays}
        record = {"what": what, **facts, "arrays": shapes, "sums": sums}
        (folder / FACTS).write_text(json.dumps(record | {SEAL: _seal(record)}, indent=1, sort_keys=True))

    def complete(folder: Path) -> bool:
        return _open(folder) is not None

    name = key_of(what, facts)
    arrays = _open(root / name) or _open(build_once(root, name, write, report, complete))
    assert arrays is not None, "once returns what is complete"
    return arrays


def _open(folder: Path) -> Arrays | None:
    """The arrays of a folder; None if something is missing or not as it was written.

    Every rank reads all files to check them. A wrong number in an order would silently train on other data.
    """
    try:
        record = read_object(folder / FACTS, BOUNDS.manifest)
        if record.pop(SEAL, None) != _seal(record):
            return None
        files = {name: OpenFile(folder / f"{name}.npy") for name in record["arrays"]}
        if any(_sum(file) != record["sums"][name] for name, file in files.items()):
            return None
    except (OSError, Unreadable, DataError):
        return None
    found = {}
    for name, (shape, code) in record["arrays"].items():
        dtype = np.dtype(code)
        found[name] = FileArray(files[name], files[name].size - math.prod(shape) * dtype.itemsize, dtype, shape)
    return found


def _seal(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sum(file: OpenFile) -> str:
    """A hash of the weighted sums of the file's pages.

    One wrong word always changes the sum of its page. Hashing the whole file would take several times as long.
    """
    digest = hashlib.sha256(str(file.size).encode())
    for start in range(0, file.size, AT_ONCE):
        data = file.read(start, min(AT_ONCE, file.size - start))
        words = np.frombuffer(data + bytes(-len(data) % (8 * PAGE)), dtype="<u8").reshape(-1, PAGE)
        digest.update(np.einsum("ij,j->i", words, WEIGHTS).tobytes())
    return digest.hexdigest()
