"""What goes wrong with a swap file."""

from __future__ import annotations

import errno
import os


class DiskError(OSError):
    """A swap file cannot be made, read or written. The message names path, piece and bytes.

    code  errno of the system's error; None where there is none
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class SwapDamaged(DiskError):
    """What is on disk is not what was written there: a file that is missing or ends early, a checksum that differs."""


ADVICE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "a limit on the size of files (ulimit -f, or the file system's own) ends there",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk reports an error",
}


def reason(code: int) -> str:
    """An errno in words."""
    told = f"{os.strerror(code)} (errno {code})"
    return f"{ADVICE[code]}: {told}" if code in ADVICE else told
