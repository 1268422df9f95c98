"""How a command ends: with a status, and one line instead of a traceback for a user's mistake."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from megazero.system.status import FAILED, INTERRUPTED, MISTAKEN, READER_LEFT
from megazero.system.unfinished import Ended
from megazero.telemetry.console import Console, Output, OutputLost, open_streams

if TYPE_CHECKING:
    from megazero.mpu.meeting import Environment

Mistakes = tuple[type[Exception], ...]


def status_of(work: Callable[[], int | None], mistakes: Mistakes = (), *, failures: Mistakes = ()) -> int:
    """Run a command's work and return its exit status. An error becomes a status and one line on stderr:

    mistakes  exceptions for a user's mistake: 2, but for those that have a `status` of their own
    failures  further exceptions: 1, as for ImportError and OSError (a missing package, a refused operation)

    Ctrl-C gives 130, and another signal 128 + its number (`Ended`). If the reader of the standard output is gone (a
    closed pipe), the status is 141, without a line.
    """
    refused: Mistakes = (ImportError, OSError, *failures)
    _open_streams()
    try:
        status = work()
        sys.stdout.flush()
    except BrokenPipeError as error:  # first, because a BrokenPipeError is an OSError, which `mistakes` may contain
        _lost_output(error)
        return READER_LEFT
    except OutputLost as error:
        print(f"error: {_lost_output(error)}", file=sys.stderr)
        return FAILED
    except mistakes as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "status", MISTAKEN)
    except refused as error:
        lost = _lost_output(error) if isinstance(error, OSError) else None
        print(f"error: {lost or error}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, Ended) as stop:
        print("stopped; nothing was written", file=sys.stderr)
        return int(str(stop.code)) if isinstance(stop, Ended) else INTERRUPTED
    return status or 0


def end_rank(work: Callable[[Environment], None], mistakes: Mistakes) -> NoReturn:
    """Run a command's work as one rank, and end the process with the statuses of `status_of`.

    Rank 0 prints a mistake, for all ranks: therefore a mistake becomes a ConfigError, which `exit_status` prints so.
    """
    from megazero.config.source import ConfigError, problem_of
    from megazero.launch import exit_now, exit_status

    environment = read_environment()
    _open_streams()

    def checked_work() -> None:
        try:
            work(environment)
            sys.stdout.flush()
        except BrokenPipeError as error:
            _lost_output(error)
            exit_now(READER_LEFT)
        except OSError as error:
            lost = _lost_output(error)
            if lost is None:
                raise
            print(f"error: {lost}", file=sys.stderr)
            exit_now(FAILED)
        except mistakes as error:
            raise ConfigError([problem_of(error, str(error))]) from error

    exit_now(exit_status(checked_work, environment))


def read_environment() -> Environment:
    """This process among its ranks. If the launcher's variables are wrong, print what is wrong and end the process.
    Ranks that wait for it are told.
    """
    from megazero.config.source import ConfigError
    from megazero.mpu.meeting import Environment, report_no_rank

    try:
        return Environment.read()
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        report_no_rank(error.problems[0])
        raise SystemExit(MISTAKEN) from error


def working_folder_is_gone() -> bool:
    """Whether the working folder does not exist any more, where libraries would crash. If so, an error is printed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        folder = f" {os.environ['PWD']}" if os.environ.get("PWD") else ""
        print(f"error: the working folder{folder} is gone: change into one that is there", file=sys.stderr)
        return True
    return False


def say(text: str) -> None:
    """Print the whole output of a command. If it cannot be written, end the program with status 141 or 1."""
    status = status_of(lambda: print(text, flush=True))
    if status:
        raise SystemExit(status)


def _open_streams() -> None:
    """Open standard streams that are closed, and make stdout's errors differ from those of other files.

    Errors of stderr, which only informs, are ignored. To write to a closed stdout is an error, unless `open_streams`
    was called before, as for commands whose result is files.
    """
    closed = getattr(sys, "stdout", None) is None
    open_streams()
    if type(sys.stdout) is io.TextIOWrapper:  # else a program has put another there, or `Output` is there already
        sys.stdout = Output(sys.stdout, closed=closed)
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = Console(sys.stderr, lambda reason: None)


def _lost_output(error: OSError) -> str | None:
    """After an OSError: the message that the standard output cannot be written; None if the output can be written.

    An output that cannot be written becomes /dev/null, so that the rest of its buffer does not fail again when the
    program ends.
    """
    try:
        sys.stdout.flush()
    except OSError as failed:
        error = failed
    else:
        if not isinstance(error, OutputLost):  # after an OutputLost the buffer is empty, and a flush succeeds
            return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"the standard output cannot be written: {error.strerror}"
