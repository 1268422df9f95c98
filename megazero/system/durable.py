"""Files and names that survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, token: str) -> None:
    """Write a small file so that it is either as it was or wholly new, also after a power cut."""
    temporary = path.with_name(f".{path.name}-{token}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and creations in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
