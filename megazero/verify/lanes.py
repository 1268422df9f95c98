"""Lanes beside the program whose work is as late as it may be, or as early, each time.

On threads a copy between the device and host memory is nearly always over when it is read, also where nobody has waited
for it, and a missing wait shows now and then. Here it shows every time: late work is done when somebody waits for it,
and not before. So what is read without a wait is what was there before, and what is overwritten too early is what is
copied. Early work is done where it is submitted, before what it should have waited for. Reads and writes of files stay
on their threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from megazero.system.host_copies import copy_bytes
from megazero.train.job import Job

NAN_BYTE = 0xFF
"""Of which a number of any floating dtype is NaN."""


class Late(NamedTuple):
    """Which lanes are late ones: those of copies, and that of updates in host memory. The others are early."""

    copies: bool
    updates: bool


ALL_LATE = Late(copies=True, updates=True)


class OrderedLane(Executor):
    """A lane as of `zero.memories.Tiers.host_updates`: its work is done in order, by whoever waits for a result, or by
    whoever submits it.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._work = deque[tuple[_Awaited, Callable[[], Any]]]()
        self._changed, self._is_working = threading.Condition(), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Put work on the lane."""
        awaited = _Awaited(self)
        with self._changed:
            self._work.append((awaited, partial(fn, *args, **kwargs)))
        if not self._late:
            self.work_until(awaited)
        return awaited

    def work_until(self, awaited: Future[Any]) -> None:
        """Return when this is over, well or not, and what was submitted before it. Threads of files may wait too."""
        while True:
            with self._changed:
                while self._is_working and not awaited.done():
                    self._changed.wait()
                if awaited.done():
                    return
                self._is_working = True
                future, work = self._work.popleft()
            try:
                future.set_result(work())
            except BaseException as error:  # whoever waits for it is told
                future.set_exception(error)
            finally:
                with self._changed:
                    self._is_working = False
                    self._changed.notify_all()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Forget what nobody has waited for."""
        with self._changed:
            for future, _ in self._work:
                future.cancel()
            self._work.clear()
            self._changed.notify_all()


class _Awaited(Future[Any]):
    def __init__(self, lane: OrderedLane) -> None:
        super().__init__()
        self._lane = lane

    def result(self, timeout: float | None = None) -> Any:
        self._lane.work_until(self)
        return super().result(timeout)


class OrderedCopies:
    """Copies of model state as of `system.copy_thread.CopyThread`, and of activations as of
    `system.host_copies.CopyLane`.
    """

    def __init__(self, *, late: bool) -> None:
        self._lane = OrderedLane(late=late)

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        after: Sequence[Callable[[], object]] = (),
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Future[Any]:
        """See `CopyThread.copy`."""

        def copied() -> None:
            for earlier in after:
                earlier()
            if wanted():
                target.detach().copy_(source.detach())

        return self._lane.submit(copied)

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """See `CopyLane.start`. Memory that is written holds NaN until the copy is made."""
        for to, _ in pairs:
            to.fill_(NAN_BYTE)

        def copied() -> None:
            for to, source in pairs:
                copy_bytes(to.data_ptr(), source.data_ptr(), source.nbytes)

        return self._lane.submit(copied).result

    def close(self) -> None:
        """Forget what nobody has waited for."""
        self._lane.shutdown()


def put_in_order(job: Job, late: Late) -> None:
    """Have the lanes of a job that has been built be late or early ones."""
    tiers, activations = job.state.model.tiers, job.activations
    tiers.to_host.close()
    tiers.to_device.close()
    tiers.host_updates.shutdown()
    tiers.to_host, tiers.to_device = OrderedCopies(late=late.copies), OrderedCopies(late=late.copies)
    tiers.host_updates = OrderedLane(late=late.updates)
    if activations is not None:
        activations.to_host.close()
        activations.to_device.close()
        activations.to_host, activations.to_device = OrderedCopies(late=late.copies), OrderedCopies(late=late.copies)
