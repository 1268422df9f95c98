"""A rank stops when it is asked to, and when nobody is left who could ask.

Killing torchrun with SIGKILL leaves its ranks running. Two things end them: the kernel kills a child whose parent
died, where it can be asked to; and every step compares the parent with the one at start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT_AT_START = os.getppid()


def started_by_torchrun(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun started this process, and not a person or another launcher."""
    return "TORCHELASTIC_RUN_ID" in (os.environ if environment is None else environment)


def die_with_parent() -> bool:
    """Ask the kernel to SIGKILL this process when its parent dies; whether that is now so.

    Only on Linux and only under torchrun: a program started by hand may outlive its shell. The request concerns the
    parent's thread that started us, and torchrun starts ranks on its main thread. The parent may have died before the
    request was made, so the first `parent_alive` still has to be asked.
    """
    if not sys.platform.startswith("linux") or not started_by_torchrun():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0


def parent_alive(initial_ppid: int = _PARENT_AT_START) -> bool:
    """Whether the parent is still the one there was at start: an orphan is adopted by another process."""
    return os.getppid() == initial_ppid


STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
"""What asks a run to stop: its scheduler, its user, a terminal that closes."""


class StopSignals:
    """Inside the `with`, the signals of `STOPPING` ask the run to stop at the end of its step instead of ending the
    process.

        with StopSignals() as stop:
            while not stop.raised: ...

    early  what to do when a signal comes before `begin`, when there is nothing to save yet; it gets the signal's name.
           It is called on a thread, so that the process answers while its main thread loads, compiles or waits for
           other ranks. None: as after `begin`.

    Later signals change nothing: a save under way is finished (SIGKILL is there for the impatient). A hang-up that
    whoever started us has chosen to ignore (nohup) stays ignored. The handlers found at entry are put back at exit.
    Only Python's main thread may set handlers.
    """

    def __init__(self, early: Callable[[str], None] | None = None) -> None:
        self._early = early
        self._before: dict[signal.Signals, Any] = {}
        self._received: signal.Signals | None = None
        self._asked: str | None = None
        self._begun = threading.Event()
        self._wake: list[int] = []

    @property
    def raised(self) -> bool:
        """Whether a signal has come, or `ask` has been called."""
        return self._received is not None or self._asked is not None

    @property
    def name(self) -> str | None:
        """Name of the first signal that came, else what `ask` was given."""
        return self._asked if self._received is None else self._received.name

    def ask(self, why: str) -> None:
        """Ask the run to stop as a signal does, from within its program."""
        self._asked = self._asked or why

    def begin(self) -> None:
        """From now on there is something to save."""
        self._begun.set()

    def __enter__(self) -> StopSignals:
        if self._early is not None:  # first, so that no signal is handled without being heard
            self._wake = [*os.pipe()]
            os.set_blocking(self._wake[1], False)
            signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(self._wake[0],), name="signals", daemon=True).start()
        for kind in STOPPING:
            if kind is signal.SIGHUP and signal.getsignal(kind) is signal.SIG_IGN:
                continue
            self._before[kind] = signal.signal(kind, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not set from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        if self._wake:
            signal.set_wakeup_fd(-1)
            os.close(self._wake.pop())  # the thread reads the end of the pipe, and closes the other one

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)

    def _listen(self, pipe: int) -> None:
        """On a thread of its own: Python writes a signal's number into the pipe when it comes, and calls handlers when
        the main thread can.
        """
        with os.fdopen(pipe, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in STOPPING and not self._begun.is_set() and self._early is not None:
                    self._early(signal.Signals(number[0]).name)
