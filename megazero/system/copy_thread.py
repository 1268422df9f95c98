"""A thread that copies between host memory and a device, one after the other, while the program goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megazero.system.streams import WaitedCopies


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
    ) -> Future[None]:
        """Start to copy, once the device has done what it was given before this call.

        after   called on the thread before: each returns when something is over
        wanted  asked on the thread; if it says no, nothing is copied

        The future raises what one of these raises.
        """
        return self._thread.submit(_copy, self._copies.behind_now(), target, source, tuple(after), wanted)

    def close(self) -> None:
        """End the thread; what has not begun is cancelled."""
        self._thread.shutdown(cancel_futures=True)


@torch.no_grad()
def _copy(
    copy: Callable[[Tensor, Tensor], None],
    target: Tensor,
    source: Tensor,
    after: Sequence[Callable[[], object]],
    wanted: Callable[[], bool],
) -> None:
    for earlier in after:
        earlier()
    if wanted():
        copy(target, source)
