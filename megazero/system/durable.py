"""Writing files so that they survive a power failure."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, token: str) -> None:
    """Replace a small file atomically and durably: after a power failure it has its old or its new content.

    token: makes the name of the temporary file unique. Raises OSError; then only the old file is there.
    """
    temporary = path.with_name(f".{path.name}-{token}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and creations in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
