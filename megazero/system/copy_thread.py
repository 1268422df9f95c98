"""A thread that copies between host memory and a device, one after the other, while the program goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from megazero.system.streams import WaitedCopies


class CopyUnderWay(Protocol):
    """A copy that has been asked for."""

    def result(self) -> object:
        """Return once it is done. Raises what has gone wrong."""
        ...


class Copies(Protocol):
    """Copies one after the other, as a `CopyThread` makes them."""

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        after: Sequence[Callable[[], object]] = (),
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> CopyUnderWay:
        """See `CopyThread.copy`."""
        ...

    def close(self) -> None: ...


class Copied:
    """A copy on its way. Whoever waits for it lets go of the tensors: no thread of copies has them by then."""

    def __init__(self, future: Future[None], held: list[Tensor]) -> None:
        self._future, self._held, self._letting_go = future, held, Lock()

    def result(self) -> None:
        """Return once the copy is made. Raises what has gone wrong."""
        self._future.result()
        # torch releases the interpreter's lock while it lets go of a tensor. Without a lock here, a second thread that
        # waits for the same copy could go on meanwhile, and the memory would be freed after its last owner is gone.
        with self._letting_go:
            self._held.clear()


class CopyThread:
    """Copies of which other threads of the host have to know that they are made. name: of the thread."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._copies = WaitedCopies(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        after: Sequence[Callable[[], object]] = (),
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Copied:
        """Start to copy, once the device has done what it was given before this call.

        after   called on the thread before: each returns when something is over
        wanted  asked on the thread; if it says no, nothing is copied

        The result raises what one of these raises.
        """
        held = [target, source]
        return Copied(self._thread.submit(_copy, self._copies.behind_now(), held, tuple(after), wanted), held)

    def close(self) -> None:
        """End the thread; what has not begun is cancelled."""
        self._thread.shutdown(cancel_futures=True)


@torch.no_grad()
def _copy(
    copy: Callable[[Tensor, Tensor], None],
    held: Sequence[Tensor],
    after: Sequence[Callable[[], object]],
    wanted: Callable[[], bool],
) -> None:
    for earlier in after:
        earlier()
    if wanted():
        copy(*held)
