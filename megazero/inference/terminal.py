"""The terminal of a chat: lines that the user types, Ctrl-C that stops an answer but not the program, safe output."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from megazero.mpu.collectives import broadcast
from megazero.mpu.grid import ProcessGrid

MARK = "> "
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""The control characters C0 and C1, except line feed and tab, as escapes. They could move the cursor, change colours,
or make a terminal send an answer as if the user had typed it.
"""


def escape_control(text: str) -> str:
    """A model's text for the standard output. If that is a terminal, control characters become escapes."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


class Terminal:
    """The standard input of rank 0, a terminal or a pipe. Every rank has an object of this class."""

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid
        self.person = grid.rank == 0 and sys.stdin.isatty()
        """Whether a user types here: rank 0, at a terminal."""
        self._ahead: list[str | None] = []
        self._stopped = False
        if self.person:
            with suppress(ImportError):
                import readline  # noqa: F401 - gives `input` line editing and history

    def line(self) -> str | None:
        """Read the next line, on rank 0; None at the end of the input.

        At a terminal, Ctrl-C discards the line that is being typed, and a Ctrl-C after the line stops its answer, even
        before it begins. From a pipe, Ctrl-C raises KeyboardInterrupt.
        """
        self._stopped = False
        if self._ahead:
            line = self._ahead.pop(0)
            print(f"{MARK}{line or ''}", file=sys.stderr, flush=True)
            return line
        if not self.person:
            read = sys.stdin.readline()
            return read.rstrip("\r\n") if read else None
        while True:
            try:
                with _signal(signal.default_int_handler):
                    return input(MARK)
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print("\nCtrl-D ends the program", file=sys.stderr, flush=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which Ctrl-C makes `stopped` return True, and raises nothing."""
        if self.grid.rank:
            yield
            return
        with _signal(self._stop), _without_signals() if self.person else _as_it_is():
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context in which Ctrl-C at a terminal never ends the program, not even between a line and its answer."""
        with _signal(self._stop) if self.person else _as_it_is():
            yield

    def stopped(self) -> bool:
        """Whether Ctrl-C was pressed since `listening` began.

        Called by all ranks; one number is broadcast over the world.
        """
        if self._stopped and self.grid.world.size == 1:
            return True
        if self.person:
            self._read_ahead()
        if self.grid.world.size > 1:
            flag = torch.tensor([int(self._stopped)], dtype=torch.int64, device=self.grid.device)
            broadcast(flag, self.grid.world).wait()
            return bool(flag.item())
        return self._stopped

    def _stop(self, *unused: Any) -> None:
        self._stopped = True

    def _read_ahead(self) -> None:
        """Read what the user typed during the answer, and keep whole lines for `line`."""
        while select.select([0], [], [], 0)[0]:
            typed = os.read(0, 1 << 16)
            if typed.endswith(termios.tcgetattr(0)[6][termios.VINTR]):
                self._stopped = True
                continue
            self._ahead += [None] if not typed else typed.decode("utf-8", errors="surrogateescape").splitlines()
            if not typed:
                return


@contextmanager
def _signal(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """A context in which Ctrl-C calls this handler."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _without_signals() -> Iterator[None]:
    """A context in which Ctrl-C ends a line, as a line feed does, and sends no signal.

    torchrun would get the signal too, and would end all ranks.
    """
    before = termios.tcgetattr(0)
    changed = termios.tcgetattr(0)
    changed[3] &= ~(termios.ISIG | termios.ECHO)
    changed[6][termios.VEOL] = changed[6][termios.VINTR]
    termios.tcsetattr(0, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)
