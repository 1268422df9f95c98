"""What a step in swap files has to fit of a run of a model family: settings, data, and the parts of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import Change, compare, record_of, run_from
from megazero.config.schema import Run
from megazero.config.tiers import Tier
from megazero.disk.swap_file import DiskError
from megazero.mpu.axes import Axes
from megazero.plan.rank_state import RankState
from megazero.train.path_checks import start_position
from megazero.train.same_data import with_present_names
from megazero.train.whole_steps import LeftStep, left_of, require_continues


@dataclass(frozen=True)
class RunSteps:
    """A `train.whole_steps.StepOwner`.

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
            "run": record_of(self.run),
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
