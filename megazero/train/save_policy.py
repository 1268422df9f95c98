"""How a run saves: the folder that it claims, what each rank writes and which files are added, in the foreground or the
background, what it prints, and what happens when a save fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megazero.checkpoint.background import SaveOutcome
from megazero.checkpoint.fence import FenceLost, new_token
from megazero.checkpoint.manager import Checkpoints, FoundCheckpoint
from megazero.checkpoint.resume_changes import record_of
from megazero.checkpoint.save_phases import SavedCheckpoint
from megazero.config.derive import whole_steps
from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.convert.model_files import model_files
from megazero.mpu.axes import Coordinates
from megazero.mpu.grid import ProcessGrid, background_group
from megazero.mpu.shared_memory import PeerError
from megazero.plan.rank_state import specs_of
from megazero.telemetry.units import transfer
from megazero.train.init_from import peft_files
from megazero.train.logs import as_config_error
from megazero.train.state import TrainingPosition
from megazero.zero.layout import owned_fragments
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.state import packing_on

PAUSES = (0.0, 1.0, 5.0, 15.0)
"""Seconds before each try of a run's last save.

The sum is less than the 30 s that a cluster gives a job between SIGTERM and SIGKILL.
"""
_ENDS_THE_RUN = (FenceLost, PeerError)
"""Failures after which another try cannot succeed: another job has the folder, or a rank is gone."""


class SavePolicy:
    """Saves at the loop's request, on the main thread or in the background.

    record    returns the `progress` that is stored with the state; all ranks call it together, just before a save
    note      prints a line in the log
    on_saved  called with the folder and the iteration of each complete checkpoint
    pauses    seconds before each try of the last save

    When a save fails, on a full disk for instance, a warning is printed and training goes on. Earlier checkpoints stay
    as they were, and the next save tries again. The last save of a run is tried as often as there are pauses; if all
    tries fail, the run fails. Where another job has taken over the folder no try can help, and the run stops
    (`superseded`).
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        record: Callable[[TrainingPosition], dict[str, Any]],
        note: Callable[[str], None],
        *,
        in_background: bool,
        on_saved: Callable[[Path, int], None] | None = None,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self._checkpoints, self._record, self._note, self._in_background = checkpoints, record, note, in_background
        self.pauses, self._on_saved = pauses, on_saved
        self.saved_at: int | None = None
        """The iteration that was saved last or is being saved; None if there is none or that save failed."""
        self.superseded = False
        """Whether another job has claimed the folder. Ranks may see this at different steps."""
        self.newest: Path | None = None
        """The folder of the newest checkpoint that this run has completed."""
        self._waited = 0.0

    def save(self, position: TrainingPosition) -> None:
        """Save, unless this position is saved already or being saved. A collective of all ranks."""
        if self.saved_at == position.iteration:
            return
        if self._in_background:
            self._start(position)
            return
        outcome = self._try(position)
        if outcome.error is not None:
            self._warn(outcome, "training goes on, and the next save tries again")

    def poll(self) -> None:
        """Print how a background save has ended, if one has. Communicates nothing."""
        outcome = self._checkpoints.poll()
        if outcome is not None:
            self._tell(outcome)

    def finish(self, position: TrainingPosition) -> None:
        """Return when this position is saved. A collective of all ranks. Raises the error of the last try."""
        if self._checkpoints.busy:
            self._collect()  # it may be this very position, which then needs no second save
        tries = len(self.pauses)
        for number, pause in enumerate(self.pauses, 1):
            if self.saved_at == position.iteration:
                return
            time.sleep(pause)
            outcome = self._try(position)
            if outcome.error is not None:
                self._warn(outcome, f"this was try {number} of {tries}")
                if number == tries:
                    raise outcome.error

    def _try(self, position: TrainingPosition) -> SaveOutcome:
        """Save on this thread and return the outcome, which is the same on all ranks. Raises `_ENDS_THE_RUN`."""
        record = self._record(position)  # a collective: outside, since an error of one rank alone must not be caught
        try:
            saved = self._checkpoints.save(position.iteration, record)
        except _ENDS_THE_RUN:
            raise
        except Exception as error:
            return SaveOutcome(position.iteration, error=error)
        self.saved_at = position.iteration
        self._note(_words(saved))
        self._complete(saved, position.iteration)
        return SaveOutcome(position.iteration, saved)

    def _start(self, position: TrainingPosition) -> None:
        began = time.perf_counter()
        if self._checkpoints.busy:
            self._note(f"iteration {position.iteration} waits with its save: the one before is still being written")
            self._collect()
        self._checkpoints.start(position.iteration, self._record(position))
        self.saved_at, self._waited = position.iteration, time.perf_counter() - began

    def _collect(self) -> None:
        """Wait for the background save. Raises `_ENDS_THE_RUN`; other failures are printed."""
        outcome = self._checkpoints.wait()
        if outcome is not None:
            self._tell(outcome)
            if isinstance(outcome.error, _ENDS_THE_RUN):
                raise outcome.error

    def _tell(self, outcome: SaveOutcome) -> None:
        if outcome.saved is not None:
            self._note(f"{_words(outcome.saved)}; the step waited {self._waited:.2f} s")
            self._complete(outcome.saved, outcome.iteration)
        elif isinstance(outcome.error, FenceLost):
            self.superseded = True
            self._note(f"the checkpoint of iteration {outcome.iteration} was not written: {outcome.error}")
        else:
            if self.saved_at == outcome.iteration:  # else a later save has begun
                self.saved_at = None
            self._warn(outcome, "training goes on, and the next save tries again")

    def _complete(self, saved: SavedCheckpoint, iteration: int) -> None:
        self.newest = saved.path
        if self._on_saved is not None:
            self._on_saved(saved.path, iteration)

    def _warn(self, outcome: SaveOutcome, then: str) -> None:
        self._note(
            f"WARNING: the checkpoint of iteration {outcome.iteration} could not be written: {outcome.error}. What "
            f"was there before is as it was; {then}"
        )


def _words(saved: SavedCheckpoint) -> str:
    return f"saved {saved.path}: {transfer(saved.bytes, saved.seconds)}"


def unsaved(run: Run, policy: SavePolicy | None) -> str:
    """What the line of a stop says besides, if nothing of the run is kept; else empty."""
    return "" if policy is not None or whole_steps(run.offload) else "; nothing is kept: there is no --save DIR"


def claim_checkpoints(
    run: Run, grid: ProcessGrid, optimizer: ShardedOptimizer, resumed: FoundCheckpoint | None
) -> Checkpoints:
    """The run's `Checkpoints`, with the save folder claimed from any earlier job.

    resumed: the checkpoint to resume from; its model files are copied on. A collective of the world: a broadcast of the
    token, and `Checkpoints.claim`. Raises ConfigError on all ranks if the folder cannot be written.
    """
    token = new_token(grid.world, grid.device)
    group = background_group(grid) if run.checkpoint.async_save else None
    extra = (peft_files(run), model_files(run, resumed)) if grid.rank == 0 and run.checkpoint.save else ()
    weights = compute_dtype(run.optimizer.precision) if run.checkpoint.no_save_optim else None
    of = run.checkpoint, record_of(run), optimizer, _fragments_of_all(run, grid), grid, token, group, _each(extra)
    checkpoints = Checkpoints(*of, weights=weights)
    with as_config_error(f"--save {run.checkpoint.save}"):
        checkpoints.claim()
    return checkpoints


def _each(writers: Sequence[Callable[[Path], None] | None]) -> Callable[[Path], None] | None:
    """One function that runs all writers that are not None; None if there are none."""
    present = [write for write in writers if write is not None]

    def write_all(folder: Path) -> None:
        for write in present:
            write(folder)

    return write_all if present else None


def _fragments_of_all(run: Run, grid: ProcessGrid) -> Callable[[], Sequence[Sequence[Any]]]:
    """A function that returns the fragments of every rank, by arithmetic without messages.

    Specs are computed once for each (pp, tp) index, since the ranks with equal indices hold the same parameters.
    """

    @cache
    def specs(pp_index: int, tp_index: int) -> Any:
        return specs_of(run, pp_index, tp_index)

    packing = packing_on(grid, run.parallel, run.offload)

    def held_by(at: Coordinates) -> list[Any]:
        return [fragment for _, fragment in owned_fragments(specs(at.pp, at.tp), grid.axes, at, packing)]

    return lambda: [held_by(grid.axes.coordinates(rank)) for rank in range(grid.axes.world_size)]
