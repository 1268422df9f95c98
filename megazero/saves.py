"""Checkpoints as the loop of a run sees them: when one is due, what is told of it, and what a failure means."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from megazero.checkpoint.background import Outcome
from megazero.checkpoint.fence import FenceLost
from megazero.checkpoint.manager import Checkpoints
from megazero.checkpoint.saving import Saved
from megazero.telemetry.units import transfer


class Position(Protocol):
    """How far a run is, as far as this file cares."""

    @property
    def iteration(self) -> int: ...


class Saves:
    """Saves at the moments that the loop names, on the run's thread or (`in_background`) beside it.

    record  what is stored with the state; called when the state is, by all ranks
    note    tells the person who reads along

    A save beside the run that fails is told, and training goes on; the next one tries again. The last save of a run is waited for,
    and if it fails, so does the run. One exception: when another job has taken the folder over, the run stops (`superseded`).
    """

    def __init__(
        self, checkpoints: Checkpoints, record: Callable[[Any], dict[str, Any]], note: Callable[[str], None], *, in_background: bool
    ) -> None:
        self._checkpoints, self._record, self._note, self._in_background = checkpoints, record, note, in_background
        self.saved_at = -1
        """Iteration that is saved, or being saved."""
        self.superseded = False
        """Whether another job writes into the folder now. Ranks may learn it at different steps."""
        self._waited = 0.0

    def save(self, position: Position) -> None:
        """Save, unless this very position is saved already or being saved. Called by all ranks."""
        if self.saved_at == position.iteration:
            return
        if self._in_background:
            self._start(position)
        else:
            self._save_now(position)

    def look(self) -> None:
        """Tell how a save beside the run has ended, if it has. Communicates nothing."""
        outcome = self._checkpoints.poll()
        if outcome is not None:
            self._tell(outcome)

    def finish(self, position: Position) -> None:
        """Return when this position is saved. Raises what prevented it. Called by all ranks."""
        if self._checkpoints.busy:
            self._collect()
        if self.saved_at != position.iteration:
            self._save_now(position)

    def _save_now(self, position: Position) -> None:
        saved = self._checkpoints.save(position.iteration, self._record(position))
        self.saved_at = position.iteration
        self._note(_words(saved))

    def _start(self, position: Position) -> None:
        began = time.perf_counter()
        if self._checkpoints.busy:
            self._note(f"iteration {position.iteration} waits with its save: the one before is still being written")
            self._collect()
        self._checkpoints.start(position.iteration, self._record(position))
        self.saved_at, self._waited = position.iteration, time.perf_counter() - began

    def _collect(self) -> None:
        """Wait for the save under way. Raises FenceLost, on all ranks; other failures are told."""
        outcome = self._checkpoints.wait()
        if outcome is not None:
            self._tell(outcome)
            if isinstance(outcome.error, FenceLost):
                raise outcome.error

    def _tell(self, outcome: Outcome) -> None:
        if outcome.saved is not None:
            self._note(f"{_words(outcome.saved)}; the step waited {self._waited:.2f} s")
        elif isinstance(outcome.error, FenceLost):
            self.superseded = True
            self._note(f"the checkpoint of iteration {outcome.iteration} was not written: {outcome.error}")
        else:
            if self.saved_at == outcome.iteration:
                self.saved_at = -1
            self._note(
                f"WARNING: the checkpoint of iteration {outcome.iteration} could not be written: {outcome.error}. The one before it is as"
                " it was; training goes on, and the next save tries again"
            )


def _words(saved: Saved) -> str:
    return f"saved {saved.path}: {transfer(saved.bytes, saved.seconds)}"
