"""Files that are being written under a name of their own, and what is left of them when a process is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process unasked. Ctrl-C raises an exception of Python's own."""


class Ended(SystemExit):
    """A signal of `ENDING`. Its code is the exit status, 128 + the signal's number."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Have the signals of `ENDING` raise `Ended` inside the block, so that unfinished files are removed.

    A signal that is ignored stays so, as below nohup. Only a main thread gets signals; in another nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        for other in before:  # the second is not to disturb what the first has begun
            signal.signal(other, signal.SIG_IGN)
        raise Ended(128 + number)

    before = {number: old for number in ENDING if (old := signal.getsignal(number)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def unfinished_path(path: Path) -> Path:
    """The name under which this process writes a file."""
    return path.with_name(f"{path.name}.unfinished-{os.getpid()}")


def open_unfinished(path: Path) -> BinaryIO:
    """Open `unfinished_path(path)` for writing, empty and locked. Remove what dead processes left of the same file.

    The lock says that the writer lives, also to other hosts and containers. Raises OSError, and FileExistsError where
    a process with the same number elsewhere writes it.
    """
    _remove_leftovers(path)
    temporary = unfinished_path(path)
    while True:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o666)
        file = open(handle, "wb", buffering=1 << 20)  # noqa: SIM115 - the caller closes it
        if _locked(file) is False:
            file.close()
            raise FileExistsError(errno.EEXIST, "is being written by another process", str(path))
        if os.fstat(file.fileno()).st_nlink:  # else another process took it for a leftover before it was locked
            file.truncate()
            return file
        file.close()


@contextmanager
def replaced_when_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end of the block, and is removed after an exception."""
    file = open_unfinished(path)
    try:
        with file:
            yield file
        os.replace(unfinished_path(path), path)
    finally:
        unfinished_path(path).unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Remove unfinished files of dead processes. What cannot be locked or removed stays."""
    pattern = re.compile(re.escape(path.name) + r"\.unfinished-\d+")
    for name in filter(pattern.fullmatch, os.listdir(path.parent)):
        with suppress(OSError), open(path.with_name(name), "r+b") as left:
            if _locked(left):
                path.with_name(name).unlink()


def _locked(file: BinaryIO) -> bool | None:
    """Lock a file: False if another process has locked it, None if the file system has no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
