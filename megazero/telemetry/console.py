"""stdout and stderr of a run. If one is lost, the run writes a line to the other and goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


class Console:
    """A text stream that may fail: the reader of a pipe ends, a terminal closes, the disk of a log file is full.

    lost  called at the first failure, with the system's reason. Later output may be lost

    All other attributes are those of the stream.
    """

    def __init__(self, stream: TextIO, lost: Callable[[str], None]) -> None:
        self._stream, self._lost = stream, lost
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


def survive_lost_console() -> None:
    """Replace stdout and stderr by `Console`s, so that the process goes on when one of them fails."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except (
            OSError
        ):  # closed by the parent: the next file that is opened would get its number, and with it other output
            os.open(os.devnull, os.O_RDWR)
    out = sys.stdout if sys.stdout is not None else open(1, "w", closefd=False)  # noqa: SIM115
    err = sys.stderr if sys.stderr is not None else open(2, "w", closefd=False)  # noqa: SIM115

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
