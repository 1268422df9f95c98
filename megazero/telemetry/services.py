"""A sink of a service beside the program: a thread hands records on, so that training neither waits for it nor ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from megazero.config.schema import Run
from megazero.system.durable import replace_file
from megazero.system.words import counted
from megazero.telemetry.record import Ending, StepRecord

RETRY_SECONDS, CLOSING_SECONDS, FAILING_SECONDS = 60.0, 20.0, 5.0
"""Seconds between two attempts after a failure; that the end of a run waits for what is on its way; the same where the
run has failed and its error has not been printed yet.
"""
MOST_ROWS = 100_000
"""Rows that wait in memory for a service that cannot be reached, some 50 MB; older ones are dropped."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step, or of an evaluation, by the keys of the metrics file; seconds: since 1970."""

    iteration: int
    seconds: float
    values: dict[str, float]


class Service(Protocol):
    """A program elsewhere that keeps the numbers of runs. Its methods may raise anything; one thread calls them."""

    def begin(self) -> None:
        """Begin the run, or go on with it. Called before the first rows."""

    def send(self, rows: Sequence[StepNumbers]) -> None:
        """Hand rows on, in the order of steps. Called again with the same rows if it raises."""

    def end(self, ending: Ending) -> None:
        """End the run. Nothing is called afterwards."""


class ServiceSink:
    """Hands the numbers of a run to a service. A `Sink` that is told how the run ends; rank 0 only.

    flag   as the user gave it, for warnings
    tell   called with warnings, also by the thread
    retry  seconds between two attempts after a failure

    The thread, and with it the run at the service, begins with the first numbers: a run that ends before its first step
    leaves nothing there. Rows that a failing service does not take wait, and each attempt sends all of them.
    """

    def __init__(self, flag: str, service: Service, tell: Callable[[str], None], retry: float = RETRY_SECONDS) -> None:
        self._flag, self._service, self._tell, self._retry = flag, service, tell, retry
        self._changed = threading.Condition()
        self._rows: list[StepNumbers] = []
        self._dropped, self._ending = 0, Ending("failed")
        self._closing = self._begun = self._behind = False
        self._thread: threading.Thread | None = None

    def step(self, record: StepRecord) -> None:
        self._put(record.iteration, numbers_of(record))

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        self._put(iteration, {name: float(loss) for name, loss in losses.items()})

    def note(self, text: str) -> None:
        """Does nothing: remarks are not handed on."""

    def flush(self, durable: bool) -> None:
        """Does nothing: the thread hands rows on as they come, and a checkpoint does not wait for a service."""

    def ended(self, ending: Ending) -> None:
        self._ending = ending

    def close(self) -> None:
        """Wait for what is on its way, but not for long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return
        limit = FAILING_SECONDS if self._ending.state == "failed" else CLOSING_SECONDS
        self._thread.join(limit)
        waiting = len(self._rows) + self._dropped
        if self._thread.is_alive():
            self._tell(f"WARNING: {self._flag}: the run ends, although the service has not answered for {limit:g} s")
        elif waiting:
            self._tell(f"WARNING: {self._flag}: {counted(waiting, 'row')} of numbers did not reach the service")

    def _put(self, iteration: int, values: dict[str, float]) -> None:
        with self._changed:
            self._rows.append(StepNumbers(iteration, time.time(), values))
            self._drop_oldest()
            self._changed.notify()
        if self._thread is None:
            # A daemon, because a service that never answers must not keep the process from ending.
            self._thread = threading.Thread(target=self._deliver, name=self._flag, daemon=True)
            self._thread.start()

    def _drop_oldest(self) -> None:
        surplus = len(self._rows) - MOST_ROWS
        if surplus > 0:
            del self._rows[:surplus]
            self._dropped += surplus

    def _deliver(self) -> None:
        """What the thread does: send all rows that wait, until the run ends. At the end one attempt is the last."""
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._closing)
                rows, self._rows, closing = self._rows, [], self._closing
            if self._attempt(rows, closing):
                continue
            with self._changed:
                self._rows = rows + self._rows
                self._drop_oldest()
                self._changed.wait_for(lambda: self._closing, self._retry)

    def _attempt(self, rows: list[StepNumbers], closing: bool) -> bool:
        """Whether the service has taken the rows, and the end of the run if it is closing. Tells the first failure."""
        try:
            if not self._begun:
                self._service.begin()
                self._begun = True
            if rows:
                self._service.send(rows)
            if closing:
                self._service.end(self._ending)
        except Exception as error:
            if not self._behind:
                reason = f"{type(error).__name__}: {str(error).strip()[:500]}"
                self._tell(
                    f"WARNING: {self._flag}: {reason}. The run goes on; its numbers wait in memory and are sent again "
                    f"every {self._retry:g} s"
                )
            self._behind = True
            return False
        if self._behind:
            self._tell(f"{self._flag}: the service answers again")
        self._behind = False
        return True


def numbers_of(record: StepRecord) -> dict[str, float]:
    """The record by the keys of the metrics file, without its step and without what is None; true is 1. Numbers that
    are not finite stay as they are, since services know them.
    """
    named = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "iteration"}
    return {
        name: value if isinstance(value, int) and not isinstance(value, bool) else float(value)
        for name, value in named.items()
        if value is not None
    }


@dataclass(frozen=True)
class RunId:
    """The name that a service has for this run, in a file in the folder of checkpoints: a resumed run finds it there.

    file   the file; None: the run saves nothing
    place  project or experiment
    known  the run's id at the service; None: the service has no such run
    check  raises if another job has taken over the folder
    """

    file: Path | None
    place: str
    known: str | None
    check: Callable[[], None] | None

    @classmethod
    def of(cls, service: str, place: str, run: Run, first_iteration: int, check: Callable[[], None] | None) -> RunId:
        """The id of a run that goes on in the folder from which it has loaded. A run that starts anew, or goes on in
        another folder, is another one: two branches of a run would mix their curves.
        """
        if run.checkpoint.save is None:
            return cls(None, place, None, check)
        save = Path(run.checkpoint.save).resolve()
        load = Path(run.checkpoint.load).resolve() if run.checkpoint.load else None
        file, known = save / f".{service}-run", None
        if first_iteration > 1 and load is not None and save in (load, *load.parents):
            with suppress(OSError, ValueError, KeyError, TypeError):
                kept = json.loads(file.read_text())
                known = str(kept["id"]) if kept["place"] == place else None
        return cls(file, place, known, check)

    def keep(self, name: str, tell: Callable[[str], None]) -> None:
        """Write the id. If it cannot be written, a resumed run becomes another one at the service."""
        if self.file is None:
            return
        try:
            if self.check is not None:
                self.check()
            replace_file(self.file, json.dumps({"place": self.place, "id": name}).encode(), name)
        except Exception as error:  # whatever it is, the numbers of this run arrive
            tell(f"WARNING: {self.file} cannot be written: {error}. A resumed run will be another one at the service")


def name_of(run: Run) -> str | None:
    """A name for people: the last part of the folder of checkpoints. None: the service makes one up."""
    return Path(run.checkpoint.save).resolve().name if run.checkpoint.save else None
