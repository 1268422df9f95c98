"""Why a folder cannot be written into, by what its file system says, and why a file may not be replaced."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megazero.system.reading import shown


def closed(folder: str) -> str | None:
    """Why this folder, which may not exist yet, cannot be written into, by what its file system says; None if no
    reason is found.
    """
    there = _nearest(folder)
    if not os.path.isdir(there):
        return f"{there} is no folder"
    system = os.statvfs(there)
    most, longest = system.f_namemax, max(Path(folder).parts, key=lambda name: len(os.fsencode(name)), default="")
    if most and len(os.fsencode(longest)) > most:
        return f"the name {shown(longest)} has {len(os.fsencode(longest))} bytes, and at most {most} can be written"
    if system.f_flag & os.ST_RDONLY:
        return f"the file system of {there} is mounted read-only"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written in"
    if not system.f_blocks:
        return _takes_no_folder(there)
    return None if system.f_bavail else f"the file system of {there} is full: 0 of its bytes are free"


def _nearest(folder: str) -> str:
    """This folder, or the nearest above it that is there."""
    return next(str(path) for path in (Path(folder), *Path(folder).absolute().parents) if os.path.lexists(path))


def _takes_no_folder(place: str) -> str | None:
    """Why no folder can be made in a place whose file system does not say how large it is, as /proc does not; a file
    system in memory may not say either, so the answer is a trial.
    """
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".megazero-trial-", dir=place))
    except OSError as error:
        return f"{place} takes no folders, as a place of the system's own ({error.strerror})"
    return None


def why_not_replaced(path: Path, kind: str, within: int, noun: str) -> str | None:
    """Why a file may not be written to this path; None if nothing is there but an earlier file of the same kind, and a
    trial shows that its folder takes files. Of a folder that is not made yet the nearest one above it is tried.

    kind: words that stand in the first `within` bytes of every such file. noun: what such a file is. Raises OSError
    where the file cannot be read.
    """
    if path.is_dir():
        return "is a folder; name a file"
    if not path.exists():
        if path.is_symlink():
            return "is a link, and nothing is where it leads"
    elif not path.is_file():  # a pipe or a device, which would be waited for or replaced
        return "is no regular file; name a file"
    else:
        with open(path, "rb") as file:
            if kind.encode() not in file.read(within):
                return f"is there already and is no {noun}; name another file"
    try:
        with tempfile.TemporaryFile(dir=_nearest(os.path.dirname(os.path.realpath(path)))):
            return None
    except OSError as error:
        return f"its folder takes no file: {error.strerror}"
