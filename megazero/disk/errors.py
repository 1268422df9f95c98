"""What goes wrong with a swap file, and what its transports say of a move."""

from __future__ import annotations

import errno
import os


class DiskError(OSError):
    """A swap file cannot be made, read or written. The message names path, piece and bytes.

    code  errno of the system's error; None where there is none
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)  # without the errno, which would become a part of its text
        self.code = code

    @classmethod
    def of(cls, message: str, error: OSError) -> DiskError:
        """The message, and what the system says."""
        return cls(f"{message}: {reason(error.errno or 0)}", error.errno)


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
    system_words = f"{os.strerror(code)} (errno {code})"
    return f"{ADVICE[code]}: {system_words}" if code in ADVICE else system_words


ENDED = 0
"""The code of a Failure without errno: nothing more could be read or written."""


class Failure(Exception):
    """A move has failed, and nothing is under way any more. `swap.run_moves` makes a DiskError of it.

    code    errno, or ENDED
    number  of the move in its list
    done    bytes of it that were moved
    """

    def __init__(self, code: int, number: int = 0, done: int = 0) -> None:
        super().__init__(code, number, done)
        self.code, self.number, self.done = code, number, done


class Broken(Exception):
    """The system has not answered, and may still use the buffers. The transport cannot be used any more."""
