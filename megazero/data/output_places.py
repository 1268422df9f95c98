"""Whether an output can be written where a flag says. All of it is known before any work."""

from __future__ import annotations

import os
from pathlib import Path

from megazero.data.indexed import DataError


def require_prefix(flag: str, given: str | Path) -> None:
    """Raise DataError for a prefix that names a folder and no files in it, or leads through a file.

    Of "", "data/" and ".." the files would be hidden ones: ".bin".
    """
    folder, _, name = str(given).rpartition("/")
    if name in ("", ".", ".."):
        place = "" if name in ("", ".") else f"{name}/"
        example = f"{folder}/{place}" if folder or str(given).startswith("/") else place
        raise DataError(f"{flag} {str(given)!r}: names no files; give a name: {example}my-data")
    require_folder(flag, given, Path(given).parent)


def require_folder(flag: str, given: str | Path, folder: Path) -> None:
    """Raise DataError where `folder`, which a flag's value leads to, is a file or lies below one."""
    if not str(given):
        raise DataError(f"{flag} '': names no folder")
    there = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
    if os.path.lexists(there) and not os.path.isdir(there):
        raise DataError(f"{flag} {given}: {there} is no folder")
