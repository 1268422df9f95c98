"""Two lanes of a disk, reads and writes, beside the program. Each begins its requests in the order of submission."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from megazero.disk.swap_file import DiskError
from megazero.disk.transports import Transport

Work = Callable[[Transport], list[int]]
"""What a lane executes on its thread; it returns the checksums of pieces."""
Need = Callable[[], object]
"""Returns once something is over that is not a request: `Future.result`, say. Raises where that has failed."""


class DiskRequest:
    """Work on a lane.

    sums   the checksums that the work has returned
    error  what went wrong, once it has ended
    """

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.error: BaseException | None = None
        self._ended, self._process = threading.Event(), os.getpid()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait_for_end(self) -> None:
        """Return when the work is over, well or not."""
        _assert_same(self._process)
        self._ended.wait()

    def wait(self) -> None:
        """Return when the work is done. Raises its error, a DiskError."""
        self.wait_for_end()
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        """Called by the lane."""
        self.error = error
        self._ended.set()


class _Job(NamedTuple):
    request: DiskRequest
    work: Work
    after: Sequence[DiskRequest]
    needs: Sequence[Need]


class _Lane:
    """A queue of jobs, and a thread for each transport that takes them from there."""

    def __init__(self, name: str, transports: Sequence[Transport], closing: threading.Event) -> None:
        self.transports = transports
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.threads = [
            # A function of no object: a thread that refers to its lanes would keep them from being collected.
            threading.Thread(target=_execute, args=(self.jobs, transport, closing), name=f"disk-{name}", daemon=True)
            for transport in transports
        ]
        for thread in self.threads:
            thread.start()


class DiskLanes:
    """A lane of reads and a lane of writes. A lane works on as many requests at a time as it has transports.

    They end at `close`, when nobody refers to them any more, or with the program. In a child of a fork they do not
    exist: every use there is an error.
    """

    def __init__(self, reads: Sequence[Transport], writes: Sequence[Transport]) -> None:
        self._process, closing = os.getpid(), threading.Event()
        self._lanes = _Lane("reads", reads, closing), _Lane("writes", writes, closing)
        self.close = weakref.finalize(self, _close, self._process, self._lanes, closing)

    @property
    def usable(self) -> bool:
        """Whether this is the process that has made the lanes, and they are not closed."""
        return os.getpid() == self._process and self.close.alive

    def submit(
        self, write: bool, work: Work, after: Sequence[DiskRequest] = (), needs: Sequence[Need] = ()
    ) -> DiskRequest:
        """Put work on a lane. It begins behind all before it on the lane, and when the requests `after` are over, well
        or not. It fails if one of `needs` does.

        The requests `after` must have been submitted before. So the first of all that are not over waits for none.
        """
        _assert_same(self._process)
        if not self.close.alive:
            raise DiskError("the files are closed")
        request = DiskRequest()
        self._lanes[write].jobs.put(_Job(request, work, after, needs))
        return request


def _assert_same(process: int) -> None:
    if os.getpid() != process:
        raise DiskError(f"process {process} has opened the files; its fork {os.getpid()} cannot use them")


def _execute(jobs: SimpleQueue[_Job | None], transport: Transport, closing: threading.Event) -> None:
    while (job := jobs.get()) is not None:
        try:
            for earlier in job.after:
                earlier.wait_for_end()
            for need in job.needs:
                need()
            if closing.is_set():
                raise DiskError("the files were closed before this was done")
            job.request.sums = job.work(transport)
        except BaseException as error:  # whoever waits must know, and the thread goes on
            job.request.end(error)
        else:
            job.request.end()
        del job  # else the thread keeps its tensors until the next one comes


def _close(process: int, lanes: Sequence[_Lane], closing: threading.Event) -> None:
    """End the threads: what has begun is finished, what waits fails."""
    if os.getpid() != process:
        return
    closing.set()  # before the ends of the queues: what stands there in between fails
    for lane in lanes:
        for _ in lane.threads:
            lane.jobs.put(None)
    for lane in lanes:
        for thread, transport in zip(lane.threads, lane.transports, strict=True):
            if thread is not threading.current_thread():  # which may drop the last reference to the lanes
                thread.join()
            transport.close()
