"""The error of a file that the system does not map into memory, whose content is not in doubt."""

from __future__ import annotations

import errno
from pathlib import Path

from megazero.convert.source import ConversionError
from megazero.system.status import FAILED


class NotMapped(ConversionError):
    """The system maps no file of this size into the memory of this process."""

    status = FAILED


def is_refusal(error: Exception) -> bool:
    """Whether a library's error says that there is no memory for a mapping: Python's, safetensors' or torch's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "unable to mmap" in str(error))


def not_mapped(path: Path, error: Exception) -> NotMapped:
    """The error to raise for this file."""
    return NotMapped(
        f"{path} has {path.stat().st_size:,} bytes, and the system does not map them into memory ({error}). The file "
        "may well be whole: this process needs a larger address space (ulimit -v), or the machine more memory"
    )
