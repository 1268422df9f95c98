"""stdin, stdout and stderr: closed ones are opened, and a character that an encoding lacks is escaped.

If a run loses stdout or stderr, it writes a line to the other and goes on.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Console:
    """A text stream that may fail: the reader of a pipe ends, a terminal closes, the disk of a log file is full.

    lost  called at the first failure, with the system's reason. Later output may be lost

    All other attributes are those of the stream.
    """

    def __init__(self, stream: TextIO, lost: Callable[[str], None]) -> None:
        self._stream: TextIO = stream._stream if isinstance(stream, Console) else stream
        self._lost = lost
        self._told = False

    def write(self, text: str) -> int:
        """As the stream's `write`, but it raises no OSError."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._tell(error)
            return len(text)

    def flush(self) -> None:
        """As the stream's `flush`, but it raises no OSError."""
        try:
            self._stream.flush()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._lost(error.strerror or str(error))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class OutputLost(OSError):
    """The standard output cannot be written. A closed pipe is a BrokenPipeError as before."""


class Output:
    """The standard output of a command whose result is what it prints. Its errors are OutputLost, so that they differ
    from the errors of other files. All other attributes are those of the stream.

    closed: whether the parent process has closed it, and the stream stands in its place; `write` raises then
    """

    def __init__(self, stream: TextIO, *, closed: bool) -> None:
        self.stream, self._closed = stream, closed

    def write(self, text: str) -> int:
        if self._closed:
            raise OutputLost(errno.EBADF, os.strerror(errno.EBADF))
        with _errors_as_output_lost():
            return self.stream.write(text)

    def flush(self) -> None:
        with _errors_as_output_lost():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def _errors_as_output_lost() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(error.errno, error.strerror) from error


def open_streams() -> None:
    """Open /dev/null in place of the standard streams that the parent process has closed; Python has None there. What
    stdout's encoding cannot write is escaped (`\\xfc`), as on stderr.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next file that is opened would get its number, and with it other output
            os.open(os.devnull, os.O_RDWR)
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            errors = "backslashreplace" if mode == "w" else None
            setattr(sys, name, open(descriptor, mode, closefd=False, errors=errors))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def survive_lost_console() -> None:
    """Replace stdout and stderr by `Console`s, so that the process goes on when one of them fails."""
    open_streams()
    given: Any = sys.stdout
    out, err = given.stream if isinstance(given, Output) else given, sys.stderr

    def telling(name: str, other: TextIO) -> Callable[[str], None]:
        def tell(reason: str) -> None:
            with suppress(OSError):
                print(
                    f"{name} is lost ({reason}); the run goes on without it, and files are written as before",
                    file=other,
                    flush=True,
                )

        return tell

    sys.stdout, sys.stderr = Console(out, telling("stdout", err)), Console(err, telling("stderr", out))
