"""A rank stops when it is asked to, and when nobody is left who could ask.

Killing torchrun with SIGKILL leaves its ranks running. Two things end them: the kernel kills a child whose parent
died, where it can be asked to; and every step compares the parent with the one at start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
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


class StopSignals:
    """Inside the `with`, SIGTERM and SIGINT ask the run to stop at the end of its step instead of ending the process.

        with StopSignals() as stop:
            while not stop.raised: ...

    Later signals of these kinds change nothing: a save under way is finished (SIGKILL is there for the impatient).
    The handlers found at entry are put back at exit. Only Python's main thread may set handlers.
    """

    def __init__(self, kinds: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._kinds = kinds
        self._before: dict[signal.Signals, Any] = {}
        self._received: signal.Signals | None = None

    @property
    def raised(self) -> bool:
        """Whether a signal has come."""
        return self._received is not None

    @property
    def name(self) -> str | None:
        """Name of the first signal that came."""
        return None if self._received is None else self._received.name

    def __enter__(self) -> StopSignals:
        for kind in self._kinds:
            self._before[kind] = signal.signal(kind, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            # None: the handler was not set from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
