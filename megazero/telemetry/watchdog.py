"""Stops a rank when a signal asks for it, and when its parent has died.

A torchrun that is killed by SIGKILL leaves its ranks running. Two things end them: on Linux the kernel kills them, as
`die_with_parent` requests; and every step compares the parent process with the one at the start.
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
_parent_at_start = [os.getppid()]
"""Its process id."""
os.register_at_fork(after_in_child=lambda: _parent_at_start.__setitem__(0, os.getppid()))


def started_by_torchrun(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in (os.environ if environment is None else environment)


def die_with_parent() -> bool:
    """Ask the kernel to send SIGKILL to this process when its parent dies; return whether it will.

    It does this only on Linux and only under torchrun: a program that was started by hand may outlive its shell. The
    kernel watches the parent's thread that started this process, which under torchrun is the main thread. The parent
    may have died before this call, so `parent_alive` is still needed.
    """
    if not sys.platform.startswith("linux") or not started_by_torchrun():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0


def parent_alive(initial_ppid: int | None = None) -> bool:
    """Whether the parent process is still the one at the start, or at the fork. An orphan gets another parent."""
    return os.getppid() == (_parent_at_start[0] if initial_ppid is None else initial_ppid)


STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
"""The signals that ask a run to stop: from a scheduler, from the user, from a terminal that closes."""


class StopSignals:
    """A context in which the signals of `STOPPING` ask the run to stop at the end of its step.

        with StopSignals() as stop:
            while not stop.raised: ...

    early  called with the signal's name when a signal comes before `begin`, when there is nothing to save. It runs on a
           thread of its own, so that the process reacts while its main thread loads, compiles or waits for other ranks.
           None: such a signal only sets `raised`

    Further signals have no effect: a save that has begun is finished (SIGKILL still ends the process). A SIGHUP that is
    ignored at entry (nohup) stays ignored. The handlers found at entry are restored at exit. Only Python's main thread
    may enter this context.
    """

    def __init__(self, early: Callable[[str], None] | None = None) -> None:
        self._early = early
        self.leaving: list[Callable[[], None]] = []
        """What `early` does before it ends the process: files are removed that would stay behind."""
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
        """Name of the first signal that came, else the argument of `ask`, else None."""
        return self._asked if self._received is None else self._received.name

    def ask(self, why: str) -> None:
        """Ask the run to stop, as a signal does. why: the reason."""
        self._asked = self._asked or why

    def begin(self) -> None:
        """Declare that there is something to save, so that signals no longer call `early`."""
        self._begun.set()

    def __enter__(self) -> StopSignals:
        if self._early is not None:  # before the handlers, so that the thread gets every signal
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
        """The thread's loop. Python writes each signal's number into the pipe at once; handlers run on the main thread
        later.
        """
        with os.fdopen(pipe, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in STOPPING and not self._begun.is_set() and self._early is not None:
                    self._early(signal.Signals(number[0]).name)
