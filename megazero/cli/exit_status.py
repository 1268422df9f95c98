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
    """Run a command's work and return its exit status. An error becomes a status and one line on stderr:

    mistakes  exceptions for a user's mistake: 2
    failures  further exceptions: 1, as for ImportError and OSError (a missing package, a refused operation)

    Ctrl-C gives 130. If the reader of the standard output is gone (a closed pipe), the status is 141, without a line.
    """
    refused: Mistakes = (ImportError, OSError, *failures)
    _open_what_is_closed()
    try:
        status = work()
        sys.stdout.flush()
    except BrokenPipeError:  # before the others, because it is an OSError, which `mistakes` may contain
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
    """Run a command's work as one rank, and end the process with the statuses of `status_of`.

    Rank 0 prints a mistake, for all ranks.
    """
    from megazero.config.source import ConfigError
    from megazero.launch import Environment, exit_now, exit_status

    here = Environment.read()
    _open_what_is_closed()

    def told() -> None:
        try:
            work(here)
            sys.stdout.flush()
        except BrokenPipeError:
            _lost_output()
            exit_now(READER_LEFT)
        except OSError:
            lost = _lost_output()
            if lost is None:
                raise
            print(f"error: {lost}", file=sys.stderr)
            exit_now(FAILED)
        except mistakes as error:
            raise ConfigError([str(error)]) from error

    exit_now(exit_status(told, here))


def say(text: str) -> None:
    """Print the whole output of a command. If it cannot be written, end the program with status 141 or 1."""

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
    """Open /dev/null as stdout or stderr, if the parent process has closed it. Python then has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _lost_output() -> str | None:
    """After an OSError: the message that the standard output cannot be written; None if it can.

    If it cannot, it becomes /dev/null, so that the rest of its buffer does not fail again when the program ends.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNWRITABLE.format(error.strerror)
    return None
