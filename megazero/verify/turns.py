"""Ranks as threads of one process, of which one runs at a time: a rank goes on until it has to wait for another one.

So a run of many ranks takes the same turns each time, two ranks never race, and ranks that wait for each other in a
circle are found at once, with what each of them waits for.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
STACK = 16 * 2**20
"""Bytes of a rank's stack. Autograd's backward runs on it."""
PATIENCE = 300.0
"""Seconds after which a rank that has the turn and neither ends nor waits for another one is given up: it waits for
something that is not there, such as a copy that nobody has started.
"""


class RankFailed(RuntimeError):
    """A rank has raised an error. `trace` is its traceback."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank}: {type(error).__name__}: {error}")
        self.rank, self.error = rank, error
        self.trace = "".join(traceback.format_exception(error))


class Standstill(RuntimeError):
    """Every rank waits for another one. `waits`: (rank, what it waits for)."""

    def __init__(self, waits: Sequence[tuple[int, str]]) -> None:
        some = "; ".join(f"rank {rank} in {what}" for rank, what in waits[:4])
        rest = f"; and {len(waits) - 4} more" if len(waits) > 4 else ""
        words = f"{len(waits)} ranks wait for each other for ever" if len(waits) > 1 else "a rank waits for ever"
        super().__init__(f"{words}: {some}{rest}")
        self.waits = tuple(waits)


class _Abandoned(BaseException):
    """Ends the thread of a rank when another one has failed. No `except Exception` of the program takes it."""


@dataclass
class _Waiting:
    key: Hashable
    what: str


class Turns:
    """The turns of a number of ranks. `run` starts them; a rank that has to wait calls `wait`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._locks = [threading.Lock() for _ in range(size)]
        self._ready: deque[int] = deque()
        self._waiting: dict[int, _Waiting] = {}
        self._failure: RankFailed | Standstill | None = None
        self._over = threading.Event()
        self._running = self._passed = 0
        self._turn = -1

    def run(self, work: Callable[[int], T]) -> list[T]:
        """The results of work(rank) on all ranks, in order of rank.

        Raises RankFailed for the first rank that raises, and Standstill where all wait for each other.
        """
        results: dict[int, T] = {}
        for lock in self._locks:
            lock.acquire()
        self._ready, self._running, self._failure = deque(range(self.size)), self.size, None
        self._waiting.clear()
        self._over.clear()
        before = threading.stack_size(STACK)
        try:
            threads = [
                threading.Thread(target=self._begin, args=(rank, work, results), name=f"rank {rank}", daemon=True)
                for rank in range(self.size)
            ]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        try:
            self._pass_on()
            self._wait_for_all()
        except (KeyboardInterrupt, SystemExit) as stop:  # no rank is to write into a folder that its caller removes
            self._failure = self._failure or RankFailed(self._turn, stop)
            self._over.wait(PATIENCE)
            raise
        for thread in threads:
            thread.join()
        for lock in self._locks:
            lock.release()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.size)]

    def _wait_for_all(self) -> None:
        """Return when all ranks have ended. Raises Standstill if a rank keeps the turn; its thread stays behind."""
        passed = -1
        while not self._over.wait(PATIENCE):
            if passed == self._passed:
                raise Standstill([(self._turn, f"its own work for {PATIENCE:.0f} s")])
            passed = self._passed

    def wait(self, rank: int, key: Hashable, what: str) -> None:
        """Let other ranks run until `wake` is called with this key. what: in words, for a standstill."""
        self._waiting[rank] = _Waiting(key, what)
        self._pass_on()
        self._locks[rank].acquire()
        if self._failure is not None:
            raise _Abandoned

    def wake(self, key: Hashable) -> None:
        """Let the ranks that wait for this go on, when their turn comes."""
        for rank in [rank for rank, waiting in self._waiting.items() if waiting.key == key]:
            del self._waiting[rank]
            self._ready.append(rank)

    def _begin(self, rank: int, work: Callable[[int], T], results: dict[int, T]) -> None:
        self._locks[rank].acquire()
        try:
            if self._failure is None:
                results[rank] = work(rank)
        except _Abandoned:
            pass
        except BaseException as error:  # whatever it is ends the run, and its caller gets it
            if self._failure is None:
                self._failure = RankFailed(rank, error)
        self._running -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the next rank that can run. After a failure the others end, one after the other."""
        self._passed += 1
        if self._ready:
            self._turn = self._ready.popleft()
            self._locks[self._turn].release()
        elif not self._running:
            self._over.set()
        else:
            if self._failure is None:
                self._failure = Standstill([(rank, waiting.what) for rank, waiting in sorted(self._waiting.items())])
            self._turn = next(iter(self._waiting))
            del self._waiting[self._turn]
            self._locks[self._turn].release()
