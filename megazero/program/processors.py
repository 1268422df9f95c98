"""The processors of a rank's host in a simulation, where lanes beside the computation run on them.

On a CPU the computation runs on the same ones: it is slower while the host updates or copies, and these are slower
beside each other. So lanes are no gift there. On a GPU's host the computation is elsewhere.
"""

from __future__ import annotations

from megazero.program.instruction import Lane

SHARED_LANES = frozenset({Lane.TO_HOST, Lane.TO_DEVICE, Lane.HOST})
"""Lanes whose work the host's processors do. A disk moves its bytes by itself."""


class Processors:
    """When they are at work for lanes beside the computation.

    beside: of what is done in a time alone, the share that is done while another lane is at work, 0 .. 1. With 0 the
    works take as long together as one after the other, whoever goes first. So what is there already keeps its time,
    and what comes later takes longer.
    """

    def __init__(self, beside: float) -> None:
        self._beside = beside
        self._busy: list[tuple[float, float]] = []

    def end(self, start: float, work: float) -> float:
        """When what begins at `start`, and takes `work` alone, ends."""
        at, left = start, work
        for begin, end in self._busy:
            if end <= at:
                continue
            if left <= begin - at:
                break
            if begin > at:
                left, at = left - (begin - at), begin
            done = (end - at) * self._beside
            if left <= done:
                return at + left / self._beside if left > 0 else at
            left, at = left - done, end
        return at + left

    def take(self, start: float, end: float) -> None:
        """A lane is at work in this time."""
        if end <= start or self._beside >= 1:
            return
        apart = [span for span in self._busy if span[1] < start or span[0] > end]
        joined = [span for span in self._busy if not (span[1] < start or span[0] > end)]
        whole = min([start, *(span[0] for span in joined)]), max([end, *(span[1] for span in joined)])
        self._busy = sorted([*apart, whole])

    def forget(self, until: float) -> None:
        """Nothing will begin before this time."""
        while self._busy and self._busy[0][1] <= until:
            del self._busy[0]
