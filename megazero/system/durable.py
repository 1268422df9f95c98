"""Writing files so that they survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, token: str) -> None:
    """Replace a small file atomically and durably: after a power failure it has its old or its new content.

    token: makes the name of the temporary file unique.
    """
    temporary = path.with_name(f".{path.name}-{token}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and creations in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
