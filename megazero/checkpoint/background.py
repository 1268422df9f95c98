"""A save in the background: a copy of the state in host memory, and a thread that writes it.

The thread does the very same as a save that is waited for (`saving.py`), over a process group of its own, since the
messages of two threads over one group would meet. It is a daemon: what it writes becomes a checkpoint in its last
moment only, so nothing is lost with it that a crash would not lose.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from megazero.checkpoint.format import Fragment, columns_of
from megazero.checkpoint.save_phases import SavedCheckpoint
from megazero.system.streams import HostCopies

NICE = 10
"""Steps down for the thread: what it takes of a core that training wants is a tenth of what it would."""


class Snapshot:
    """What this rank writes, as it was at one moment. The memory is kept for the next one, which overwrites it."""

    def __init__(self, device: torch.device) -> None:
        self._copies = HostCopies(device)

    def reserve(self, fragments: Sequence[Fragment]) -> int:
        """Take the memory now that these need, so that the first step that saves waits no longer than others; its
        bytes.
        """
        return self._copies.reserve([tensor for fragment in fragments for tensor in columns_of(fragment).values()])

    def take(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Copies of the fragments. Returns when they are made."""
        tensors = [tensor for fragment in fragments for tensor in columns_of(fragment).values()]
        copies = iter(self._copies.take(tensors))
        return [
            Fragment(one.spec, one.start, one.stop, **{column: next(copies) for column in columns_of(one)})
            for one in fragments
        ]


@dataclass(frozen=True)
class Outcome:
    """How a save ended: what was saved, or why not."""

    iteration: int
    saved: SavedCheckpoint | None = None
    error: Exception | None = None


class Background:
    """At most one save at a time, on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []

    def start(self, iteration: int, write: Callable[[], SavedCheckpoint]) -> None:
        """Begin to write; the one before must have been collected."""
        assert self._thread is None, "the outcome of the save before is still to be collected"
        self._thread = threading.Thread(target=self._run, args=(iteration, write), name="megazero-save", daemon=True)
        self._thread.start()

    def poll(self) -> Outcome | None:
        """The outcome of a save that has ended, once."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> Outcome | None:
        """Wait for the save under way, and give its outcome, once; None where there is none."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        return self._outcomes.pop()

    @property
    def busy(self) -> bool:
        """Whether a save is under way, or its outcome not collected."""
        return self._thread is not None

    def _run(self, iteration: int, write: Callable[[], SavedCheckpoint]) -> None:
        _stand_back()
        try:
            outcome = Outcome(iteration, saved=write())
        except Exception as error:
            outcome = Outcome(iteration, error=error)
        self._outcomes.append(outcome)


def _stand_back() -> None:
    """Let the threads that train have the cores first.

    On Linux a priority is a thread's own; elsewhere it is the whole process's.
    """
    if sys.platform.startswith("linux"):
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + NICE, 19))
