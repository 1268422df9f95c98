"""Whole steps on disks (--nvme-checkpoint): where the swap files of an earlier process lead, and how a step of this
process is recorded once all of its state is durable.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from megazero.checkpoint.agreement import attempt_on_all_ranks, broadcast_text
from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import Change, compare, run_from
from megazero.checkpoint.resume_changes import record_of as record_of_run
from megazero.config.schema import Run
from megazero.config.tiers import Tier
from megazero.disk.lanes import DiskRequest
from megazero.disk.opening import open_swap, record_of, record_of_others
from megazero.disk.swap import SwapRecord, SwapSpace
from megazero.disk.swap_file import CHECKPOINT, PREFIX, DiskError, SwapDamaged, stem_of
from megazero.mpu import collectives
from megazero.mpu.axes import Axes
from megazero.mpu.grid import ProcessGrid
from megazero.plan.rank_state import RankState
from megazero.telemetry.steplog import StepLog
from megazero.train.path_checks import start_position
from megazero.train.same_data import with_present_names
from megazero.train.state import TrainingPosition, TrainState
from megazero.zero.portions import flip
from megazero.zero.state import ModelState

NONE, FAR = -1, 2**62
"""A number of a step that is none, and one that no step has."""


@dataclass(frozen=True)
class SwapStart:
    """Where the swap files of an earlier process lead.

    about  what is kept with every step of these files: `run`, `layout`, `contents` of this rank's pieces, `job` (a
           token of the run that has begun them), `begun` (the iteration from which it has)
    step   the iteration from which this run goes on; None: the files begin anew
    progress  of that step, as `TrainState.record` returned it
    """

    about: Mapping[str, Any]
    step: int | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> TrainingPosition:
        """Of the step from which this run goes on."""
        return TrainingPosition.read(self.progress)

    def words(self, folders: Sequence[str], resumed: FoundCheckpoint | None) -> str:
        """What the run starts from, for the banner. resumed: the checkpoint of --load, which is earlier."""
        later = "" if resumed is None else f" (later than {resumed.path})"
        return f"swap files in {' '.join(folders)}, iteration {self.step}{later}"

    def opened(
        self, folders: Sequence[Path], pieces: Mapping[str, int], rank: int, again: Collection[str]
    ) -> SwapSpace:
        """The swap files of a rank: at that step, or begun anew. again: as there. Raises DiskError."""
        resume = self.step is not None
        with saying_way_out(folders):
            return open_swap(folders, pieces, job=CHECKPOINT, rank=rank, again=again, resume=resume, step=self.step)


@dataclass(frozen=True)
class LeftStep:
    """What a rank finds: a record, and whether it is its own. first: it tells of the first step of its files."""

    path: Path
    record: SwapRecord
    own: bool

    @property
    def about(self) -> Mapping[str, Any]:
        return self.record.last.about

    @property
    def first(self) -> bool:
        return self.record.last.step == int(self.about["begun"]) + 1


class StepOwner(Protocol):
    """What a step in swap files has to fit: a run with its model and its data, on this rank."""

    @property
    def folders(self) -> Sequence[Path]:
        """Those of the files."""

    @property
    def begins(self) -> int:
        """The iteration from which the run begins without these files."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What is kept with each of its steps. It has `layout`, the sizes of the grid's axes."""

    def differences(self, left: LeftStep, *, newer: bool) -> tuple[str, Sequence[str]]:
        """(what the run has by which a step was left, how it differs). No differences: this run goes on from the step.
        newer: the step is later than `begins`, and would be lost.
        """


def swap_start(owner: StepOwner, grid: ProcessGrid, pieces: Mapping[str, int], token: str) -> SwapStart:
    """Where the swap files of an owner lead: to the latest step that all ranks have whole, if it is later than the one
    from which the run begins.

    pieces: of this rank. token: of a run that begins anew

    A collective of the world: two all-reduces of a few int64, and a broadcast. Raises DiskError on all ranks where the
    files are another run's, or not those of all ranks.
    """
    folders = owner.folders
    (begins,) = _least(grid, [owner.begins])
    fresh = {**owner.about, "job": token, "begun": begins}
    left: LeftStep | None = None

    def look() -> None:
        nonlocal left
        left = left_of(folders, grid.rank) if pieces else None
        if left is not None:
            require_continues(left, owner, newer=left.record.last.step > begins)

    attempt_on_all_ranks(grid.world, grid.device, look)
    common = _Common.of(left, grid, bool(pieces))
    # What the files have is in the checkpoint, or all ranks begin the first step again, whose files some have not.
    if common.latest <= begins or common.only_first:
        return SwapStart(fresh)
    attempt_on_all_ranks(grid.world, grid.device, lambda: common.check(left, folders, grid.rank, bool(pieces)))
    if common.step <= begins:
        return SwapStart(fresh)
    of_holder = left.record.back_to(common.step).last.about if left and grid.rank == common.holder else None
    about = json.loads(broadcast_text(grid.world, grid.device, json.dumps(of_holder), common.holder) or "")
    return SwapStart({**fresh, "job": about["job"], "begun": about["begun"]}, common.step, about["progress"])


def require_continues(left: LeftStep, owner: StepOwner, *, newer: bool) -> None:
    """Raise DiskError if a run cannot go on from a step that it would lose otherwise."""
    what, differs = owner.differences(left, newer=newer)
    if differs:
        raise DiskError(
            f"{left.path}: has iteration {left.record.last.step} of a run with {what} ({'; '.join(differs)}). To go on "
            "from there: the command of that run with --save DIR, then this one with --load DIR. Or "
            f"{way_out(owner.folders)}"
        )


@dataclass(frozen=True)
class RunSteps:
    """The `StepOwner` of a run of a model family.

    resumed  the checkpoint of --load
    plans    the order of samples; None: it is not known yet, and not compared
    """

    run: Run
    axes: Axes
    rank: int
    resumed: FoundCheckpoint | None
    plans: Sequence[Sequence[int]] | None
    nccl: bool

    @property
    def folders(self) -> Sequence[Path]:
        return [Path(folder) for folder in self.run.offload.nvme_path]

    @property
    def begins(self) -> int:
        return start_position(self.run, self.resumed)[0]

    @cached_property
    def state(self) -> RankState:
        """The model state of the rank."""
        return RankState(self.run, self.axes, self.axes.coordinates(self.rank), nccl=self.nccl)

    @cached_property
    def about(self) -> Mapping[str, Any]:
        return {
            "run": record_of_run(self.run),
            "layout": self.axes.sizes,
            "contents": self.state.contents,
            "data_plans": None if self.plans is None else [list(plan) for plan in self.plans],
        }

    def differences(self, left: LeftStep, *, newer: bool) -> tuple[str, Sequence[str]]:
        """See `StepOwner.differences`."""
        about, run, now = left.about, self.run, self.about
        # What a flag may allow of a checkpoint comes out as a change, and is refused below: a step goes on as it was
        # begun.
        as_saved = replace(
            run.checkpoint, finetune=False, override_batch=True, override_data=True, override_opt_param_scheduler=True
        )
        then, today = with_present_names(run_from(about["run"]), run), replace(run, checkpoint=as_saved)
        comparison = compare(then, today, about["layout"], now["layout"])
        if comparison.problems or not newer:
            return "another model", comparison.problems
        allowed = [replace(change, allowed_by=None) for change in comparison.changes if change.allowed_by]
        if differs := [str(change) for change in (*allowed, *_other_base(then, run))]:
            return "other settings", differs
        if self.plans is not None and about["data_plans"] != now["data_plans"]:
            return "other settings", ["another order of samples"]
        if left.path.parent != self.folders[0]:
            now_in = " ".join(map(str, self.folders))
            return "other folders", [f"nvme-path {' '.join(then.offload.nvme_path)} -> {now_in}"]
        if about["contents"] == now["contents"] if left.own else about["layout"] == now["layout"]:
            return "", []
        buffers = Change("nvme-buffer-bytes", then.offload.nvme_buffer_bytes, run.offload.nvme_buffer_bytes)
        differs = [str(one) for one in (*comparison.changes, buffers) if one.old != one.new]
        # A value that was given then and is left open now is no change (`resume_changes`).
        given = "its parts have other sizes: --bucket-size, for one, may have been given then or now only"
        return "another layout", differs or [given]


def left_problems(
    run: Run, axes: Axes, ranks: Iterable[int], resumed: FoundCheckpoint | None, *, nccl: bool
) -> list[str]:
    """Why ranks of this host cannot go on from the swap files in the folders of --nvme-path, each reason once.

    Reads records alone, and communicates nothing: `swap_start` compares the order of samples and the ranks, too.
    """
    problems = list[str]()
    for rank in ranks:
        owner = RunSteps(run, axes, rank, resumed, None, nccl)
        try:
            left = left_of(owner.folders, rank) if Tier.DISK in owner.state.pieces else None
            if left is not None:
                require_continues(left, owner, newer=left.record.last.step > owner.begins)
        except DiskError as error:
            problems.append(f"--nvme-path {' '.join(run.offload.nvme_path)}: {error}")
    return [*dict.fromkeys(problems)]


def _other_base(then: Run, now: Run) -> list[Change]:
    """Other weights from which the run has begun, which do not show in its settings."""
    pairs = {
        name: (getattr(then.checkpoint, name), getattr(now.checkpoint, name))
        for name in ("init_from", *(("load",) if now.checkpoint.finetune else ()))
    }
    return [Change(name.replace("_", "-"), old, new) for name, (old, new) in pairs.items() if old != new]


class _Common(NamedTuple):
    """What all ranks find together.

    step        the least of their last steps; NONE: a rank with pieces has no record of its own
    holder      the first rank with a record of its own
    latest      the last step of which any record tells
    only_first  whether a rank has none and no record tells of more than the first step: the ranks were killed before
                all of them had flipped for the first time
    one_run     whether all records are of one run
    """

    step: int
    holder: int
    latest: int
    only_first: bool
    one_run: bool

    @classmethod
    def of(cls, left: LeftStep | None, grid: ProcessGrid, has_pieces: bool) -> _Common:
        """A collective of the world."""
        has_record = left is not None and left.own
        last = NONE if left is None else left.record.last.step
        job = None if left is None else int(left.about["job"], 16)  # 12 hexadecimal digits, which an int64 holds
        # A negative number stands where the most is wanted: one all-reduce finds all of them. A rank that has no number
        # puts FAR there, which is the least of none.
        step, holder, latest, later, least_job, most_job = _least(
            grid,
            [
                last if has_record else NONE if has_pieces else FAR,
                grid.rank if has_record else FAR,
                -last,
                -int(left is not None and not left.first),
                FAR if job is None else job,
                FAR if job is None else -job,
            ],
        )
        return cls(step, holder, -latest, step == NONE and not later, least_job == -most_job)

    def check(self, left: LeftStep | None, folders: Sequence[Path], rank: int, has_pieces: bool) -> None:
        """Raise SwapDamaged if this rank does not have the step."""
        if not has_pieces:
            return
        if left is None or not left.own:
            path = folders[0] / f"{stem_of(CHECKPOINT, rank)}.json"
            raise SwapDamaged(f"{path}: is missing, and other ranks have step {self.latest}; {way_out(folders)}")
        if not self.one_run:
            raise SwapDamaged(f"{left.path}: the ranks have swap files of different runs; {way_out(folders)}")
        if self.step != NONE and self.step not in left.record.steps:
            has = " and ".join(map(str, left.record.steps))
            raise SwapDamaged(f"{left.path}: has no step {self.step} as another rank, but {has}; {way_out(folders)}")


def _least(grid: ProcessGrid, numbers: Sequence[int]) -> list[int]:
    """The least of each number over all ranks. A collective: an all-reduce of int64."""
    least = torch.tensor(numbers, dtype=torch.int64, device=grid.device)
    collectives.all_reduce(least, grid.world, "min").wait()
    return [int(number) for number in least.tolist()]


def left_of(folders: Sequence[Path], rank: int) -> LeftStep | None:
    """The record of this rank; without one that of another rank, which tells whose the files are."""
    with saying_way_out(folders):
        own = record_of(folders, CHECKPOINT, rank)
        other = None if own is not None else record_of_others(folders, CHECKPOINT)
    if own is not None:
        return LeftStep(folders[0] / f"{stem_of(CHECKPOINT, rank)}.json", own, own=True)
    return None if other is None else LeftStep(*other, own=False)


@contextmanager
def saying_way_out(folders: Sequence[Path | str]) -> Iterator[None]:
    """Say of files that are damaged how a run begins without them."""
    try:
        yield
    except SwapDamaged as error:
        raise SwapDamaged(f"{error}; {way_out(folders)}") from error


def way_out(folders: Sequence[Path | str]) -> str:
    """How a run begins without the files in these folders."""
    files = " ".join(f"{folder}/{PREFIX}{CHECKPOINT}-*" for folder in folders)
    return f"to begin without these files: delete {files}"


class WholeSteps:
    """Has every step become whole in this rank's swap files, one behind the other.

    host   what this rank updates in host memory
    start  where the files lead; None: no step becomes whole on disks
    late   whether a step's updates are made in the next one (--late-update)

    No rank may write over a step while another one still stands before the flip behind it. So every rank waits (`wait`)
    for its flips ahead of the reduction of the norm, which all of them enter, and behind which the next states are
    written.
    """

    def __init__(self, model: ModelState, start: SwapStart | None, *, late: bool) -> None:
        self._model, self._start, self._late = model, start, late
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
        swap = self._model.tiers.swap
        return not self._over and self._start is not None and swap is not None and bool(swap.record)

    def _flip_left(self) -> None:
        if self._left is not None and self._model.tiers.swap is not None and self._start is not None:
            iteration, progress = self._left
            self._flip = flip(self._model, iteration, {**self._start.about, "progress": progress})
        self._left = None
