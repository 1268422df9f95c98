"""A save in the background: a copy of the state in host memory, and a thread that writes it.

The thread runs the same phases as a synchronous save (`save_phases.py`). It uses a process group of its own, because
the collectives of two threads over one group would mix. It is a daemon thread: if the process exits early, the
unfinished checkpoint is lost, as it would be in a crash.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from megazero.checkpoint.save_phases import SavedCheckpoint
from megazero.system.streams import HostCopies
from megazero.zero.layout import Fragment, StoredFragment

NICE = 10
"""Added to the niceness of the saving thread: where it competes with training for a core, it gets about a tenth."""


class Snapshot:
    """A host copy of what this rank writes. The next copy reuses and overwrites the memory."""

    def __init__(self, device: torch.device) -> None:
        self._copies = HostCopies(device)

    def reserve(self, fragments: Sequence[StoredFragment]) -> int:
        """Allocate the memory for these fragments and return its size in bytes.

        The first save then takes no longer than later ones.
        """
        return self._copies.reserve([one.numel * dtype.itemsize for one in fragments for dtype in one.dtypes.values()])

    def take(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Return the fragments with host copies of their tensors, once the copies are complete."""
        tensors = [tensor for fragment in fragments for tensor in fragment.columns.values()]
        copies = iter(self._copies.take(tensors))
        return [
            Fragment(one.spec, one.start, one.stop, {column: next(copies) for column in one.columns})
            for one in fragments
        ]


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended: exactly one of `saved` and `error` is set."""

    iteration: int
    saved: SavedCheckpoint | None = None
    error: Exception | None = None


class BackgroundSave:
    """At most one save at a time, on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcomes: list[SaveOutcome] = []

    def start(self, iteration: int, write: Callable[[], SavedCheckpoint]) -> None:
        """Start `write` on the thread. The outcome of the previous save must have been taken by `poll` or `wait`."""
        assert self._thread is None, "the outcome of the save before is still to be collected"
        self._thread = threading.Thread(target=self._run, args=(iteration, write), name="megazero-save", daemon=True)
        self._thread.start()

    def poll(self) -> SaveOutcome | None:
        """Return the outcome of a save that has ended, once; None while it is under way, or if there is none."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> SaveOutcome | None:
        """Wait for the save under way and return its outcome, once; None if there is no save."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        return self._outcomes.pop()

    @property
    def busy(self) -> bool:
        """Whether a save is under way or its outcome has not been taken yet."""
        return self._thread is not None

    def _run(self, iteration: int, write: Callable[[], SavedCheckpoint]) -> None:
        _lower_priority()
        try:
            outcome = SaveOutcome(iteration, saved=write())
        except Exception as error:
            outcome = SaveOutcome(iteration, error=error)
        self._outcomes.append(outcome)


def _lower_priority() -> None:
    """Lower this thread's priority below that of the training threads.

    Only on Linux, where a priority belongs to a thread; elsewhere it belongs to the whole process.
    """
    if sys.platform.startswith("linux"):
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + NICE, 19))
