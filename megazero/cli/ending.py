"""How a command ends: with a status, and one line instead of a traceback for a user's mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from megazero.system.status import FAILED, INTERRUPTED, MISTAKEN, READER_LEFT

if TYPE_CHECKING:
    from megazero.launch import Environment

Mistakes = tuple[type[Exception], ...]
UNWRITABLE = "the standard output cannot be written: {}"


def status_of(work: Callable[[], int | None], mistakes: Mistakes = (), *, failures: Mistakes = ()) -> int:
    """The status of a command that does this: its own; 2 with one message for one of the mistakes, 1 with one for one
    of the failures, where a package is missing or the system refuses something, 130 on Ctrl-C, 141 where nobody reads
    on.
    """
    refused: Mistakes = (ImportError, OSError, *failures)
    _open_what_is_closed()
    try:
        status = work()
        sys.stdout.flush()
    except BrokenPipeError:  # an OSError, which may be one of the mistakes
        _lost_output()
        return READER_LEFT
    except mistakes as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKEN
    except refused as error:
        print(f"error: {_lost_output() or error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
    return status or 0


def end_rank(work: Callable[[Environment], None], mistakes: Mistakes) -> NoReturn:
    """Do this as one rank, and end its process with the same statuses. Rank 0 tells a mistake, for all ranks."""
    from megazero.config.source import ConfigError
    from megazero.launch import Environment, exit_status, leave

    here = Environment.read()
    _open_what_is_closed()

    def told() -> None:
        try:
            work(here)
            sys.stdout.flush()
        except BrokenPipeError:
            _lost_output()
            leave(READER_LEFT)
        except OSError:
            lost = _lost_output()
            if lost is None:
                raise
            print(f"error: {lost}", file=sys.stderr)
            leave(FAILED)
        except mistakes as error:
            raise ConfigError([str(error)]) from error

    leave(exit_status(told, here))


def say(text: str) -> None:
    """Print a text that is all that was asked for. Ends the program where it does not arrive: 141 or 1."""

    def work() -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(UNWRITABLE.format(error.strerror)) from error

    status = status_of(work)
    if status:
        raise SystemExit(status)


def _open_what_is_closed() -> None:
    """Who started us may have closed the standard output or error: then they lead nowhere, and are there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _lost_output() -> str | None:
    """After an OSError: why the standard output cannot be written, where that is so.

    It leads nowhere from then on, so that what is left in its buffer does not fail once more when the program ends.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNWRITABLE.format(error.strerror)
    return None
