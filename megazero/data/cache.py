"""Folders that are built once per file system and then only read.

`once` is called by every rank alike. The first to get the file lock builds, in a temporary folder that is synced and renamed; the others
sleep on the lock, say what they wait for, and find the finished folder. A builder that dies loses its lock to the next one. No collective
is involved, so nothing can time out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.data.mapped import DataError, Mapping, map_npy
from megazero.data.progress import Report, clock
from megazero.durable import sync_folder
from megazero.telemetry.units import size

FORMAT = 1
FACTS = "facts.json"
SAY_EVERY = 5.0
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError)
"""What damaged files make of reading them."""


class Cached(dict[str, NDArray]):
    """Arrays by name, and the mappings of the files that they lie in."""

    mappings: Sequence[Mapping] = ()


def default_root() -> Path:
    return Path.home() / ".cache" / "megazero"


def key_of(what: str, facts: dict[str, Any]) -> str:
    """Name of a cache folder: a hash of everything that determines its contents."""
    text = json.dumps({"format": FORMAT, "what": what, **facts}, sort_keys=True)
    return f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def once(
    root: Path, name: str, build: Callable[[Path, Report], None], report: Report, complete: Callable[[Path], bool] = Path.is_dir
) -> Path:
    """root/name, built by build(temporary folder, report) unless it is there and `complete`."""
    folder = root / name
    if complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f"{name}.lock", "a+")  # noqa: SIM115 - closed below
    except OSError as error:
        raise DataError(f"--data-cache-path {root}: {error.strerror}; name a folder that can be written") from error
    with lock, _held(lock.fileno(), name, report):
        if complete(folder):
            return folder

        def say(text: str) -> None:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}: {text}")
            lock.flush()
            report(text)

        if folder.exists():
            report(f"{folder} is damaged, and is built again")
        _build(root, folder, build, say, complete)
    return folder


@contextlib.contextmanager
def _held(handle: int, name: str, report: Report) -> Iterator[None]:
    """The lock is polled, so that a waiting rank can pass on what the builder last wrote into the lock file."""
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
                report(f"waiting {clock(now - start)} for {name}: {note}")
            time.sleep(0.05)
        except OSError as error:
            raise DataError(f"--data-cache-path: this file system gives no file locks ({error.strerror}); name another folder") from error
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


def _build(root: Path, folder: Path, build: Callable[[Path, Report], None], report: Report, complete: Callable[[Path], bool]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.unfinished-", dir=root))
    try:
        temporary.chmod(0o755)
        build(temporary, report)
        for path in temporary.rglob("*"):
            if path.is_file():
                with open(path, "rb") as written:
                    os.fsync(written.fileno())
        sync_folder(temporary)
        if folder.exists():  # it was there and not complete
            folder.rename(temporary.with_name(f"{temporary.name}-old"))
        try:
            temporary.rename(folder)
        except OSError:
            if not complete(folder):  # a network file system may show another machine's finished folder late
                raise
        sync_folder(root)
    except OSError as error:  # numpy tells of a full disk in numbers of elements
        free, name = shutil.disk_usage(root).free, folder.name
        raise DataError(
            f"{name} cannot be written to {root}, where {size(free)} are free ({error}); --data-cache-path chooses another"
        ) from error
    finally:
        for left in (temporary, temporary.with_name(f"{temporary.name}-old")):
            shutil.rmtree(left, ignore_errors=True)


def cached_arrays(root: Path, what: str, facts: dict[str, Any], build: Callable[[Report], dict[str, NDArray]], report: Report) -> Cached:
    """Arrays that `facts` determine, memory-mapped from the cache. Each is an .npy file in its own right; one whose hash is another than
    when it was written is built again."""

    def write(folder: Path, say: Report) -> None:
        arrays = build(say)
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)
        shapes = {name: [list(values.shape), values.dtype.str] for name, values in arrays.items()}
        hashes = {name: _hash(values) for name, values in arrays.items()}
        (folder / FACTS).write_text(json.dumps({"what": what, **facts, "arrays": shapes, "sha256": hashes}, indent=1, sort_keys=True))

    def complete(folder: Path) -> bool:
        return _open(folder) is not None

    name = key_of(what, facts)
    arrays = _open(root / name) or _open(once(root, name, write, report, complete))
    assert arrays is not None, "once returns what is complete"
    return arrays


def _open(folder: Path) -> Cached | None:
    """None when something is missing or is not what was written: reading all of it takes a second per GB, and an order with a wrong
    number in it would be a run on other data."""
    try:
        record = json.loads((folder / FACTS).read_text())
        files = {name: map_npy(folder / f"{name}.npy") for name in record["arrays"]}
        found = Cached({name: values for name, (values, _) in files.items()})
        found.mappings = [mapping for _, mappings in files.values() for mapping in mappings]
        same = all(
            [list(values.shape), values.dtype.str] == record["arrays"][name] and _hash(values) == record["sha256"][name]
            for name, values in found.items()
        )
    except UNREADABLE:
        return None
    return found if same else None


def _hash(values: NDArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data if values.size else b"").hexdigest()
