"""Optimizer steps that become whole on disks (--nvme-checkpoint): each is recorded once all of its state is durable."""

from __future__ import annotations

from typing import Any

from megazero.disk.lanes import DiskRequest
from megazero.telemetry.steplog import StepLog
from megazero.train.state import TrainingPosition, TrainState
from megazero.train.swap_start import SwapStart
from megazero.zero.host_parts import HostParts


class WholeSteps:
    """Has every step become whole in this rank's swap files, one behind the other.

    host   what this rank updates in host memory
    start  where the files lead; None: no step becomes whole on disks
    late   whether a step's updates are made in the next one (--late-update)

    No rank may write over a step while another one still stands before the flip behind it. So every rank waits (`wait`)
    for its flips ahead of the reduction of the norm, which all of them enter, and behind which the next states are
    written.
    """

    def __init__(self, host: HostParts, start: SwapStart | None, *, late: bool) -> None:
        self._host, self._start, self._late = host, start, late
        self._left: tuple[int, dict[str, Any]] | None = None
        self._flip: DiskRequest | None = None
        self._over = False

    def leave(self, state: TrainState, position: TrainingPosition, log: StepLog) -> None:
        """A step is over. It becomes whole now, or with late updates at the next `wait`, when they are made.

        Its metrics are written first, because a run that goes on from the step does not repeat it. Waits for the
        device. A collective of all ranks, as `StepLog.flush` is.
        """
        if self._start is None:
            return
        assert self._left is None, "the step before has not become whole"
        log.flush()
        self._left = position.iteration, state.record(position)
        if not self._late:
            self._flip_left()

    def wait(self) -> None:
        """Return when all steps whose updates are made are whole on this rank's disks. Raises DiskError."""
        self._flip_left()
        if self._flip is not None:
            self._flip.wait()

    def end(self, position: TrainingPosition, log: StepLog, *, needed: bool) -> None:
        """The loop has ended well. needed: whether a run may have to go on from its last step."""
        self._over = not needed
        if needed and self._start is not None:
            log.note(f"swap files keep iteration {position.iteration}: the same command goes on from there")

    @property
    def kept(self) -> bool:
        """Whether the files stay: they have a whole step, and the loop has not ended without need for it."""
        return (
            not self._over and self._start is not None and (swap := self._host.swap) is not None and bool(swap.record)
        )

    def _flip_left(self) -> None:
        if self._left is not None and self._host.swap is not None and self._start is not None:
            iteration, progress = self._left
            self._flip = self._host.flip(iteration, {**self._start.about, "progress": progress})
        self._left = None
