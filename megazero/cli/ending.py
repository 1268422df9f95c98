"""How a command ends: with a status, and one line instead of a traceback for a user's mistake."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

FAILED, MISTAKEN, INTERRUPTED = 1, 2, 128 + signal.SIGINT


def reader_left() -> int:
    """After a BrokenPipeError: nobody reads the standard output any more (`| head`).

    It leads nowhere from now on; returns the status.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def status_of(work: Callable[[], int | None], mistakes: tuple[type[Exception], ...] = ()) -> int:
    """The status of a command that does this: its own; 2 with one message for one of the mistakes, 1 where a
    package is missing or the system refuses something, 130 on Ctrl-C, 141 where nobody reads on.
    """
    try:
        status = work()
        sys.stdout.flush()
    except BrokenPipeError:  # an OSError, which may be one of the mistakes
        return reader_left()
    except mistakes as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKEN
    except (ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
    return status or 0
