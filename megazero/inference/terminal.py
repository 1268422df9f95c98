"""The person at the terminal: the lines that are typed, the Ctrl-C that stops an answer and not the program, and what
may be shown there.
"""

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
"""Characters that move a cursor, change colours or have a terminal answer as if somebody had typed: C0 and C1, but for
line feed and tab.
"""


def harmless(text: str) -> str:
    """What a model says, for the standard output: at a terminal control characters are written as escapes, elsewhere
    all is as it is.
    """
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


class Terminal:
    """The standard input of rank 0, a terminal or a pipe. Every rank has one of these."""

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid
        self.person = grid.rank == 0 and sys.stdin.isatty()
        """Whether somebody types here."""
        self._ahead: list[str | None] = []
        self._stopped = False
        if self.person:
            with suppress(ImportError):
                import readline  # noqa: F401 - `input` gets keys to edit a line and to bring earlier ones back

    def line(self) -> str | None:
        """The next line, on rank 0; None at the end. A person's Ctrl-C takes back what was typed; from a pipe it is
        raised.

        From here on a person's Ctrl-C is for the answer to this line, also before it begins.
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
        """Within, Ctrl-C raises nothing: `stopped` tells of it."""
        if self.grid.rank:
            yield
            return
        with _signal(self._stop), _without_signals() if self.person else _as_it_is():
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, the program is a person's: no Ctrl-C ends it, be it between a line and its answer."""
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
        """What was typed while the answer came: whole lines wait for their turn, a begun one stays
        with the terminal.
        """
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
    """Within, Ctrl-C calls this."""
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
    """Ctrl-C ends a line, as a line feed does, and sends no signal: torchrun, to whom it would go too, ends all ranks
    at one.
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
