"""What a step in swap files has to fit of a run of a user's model: settings, samples, and the parts of each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.mpu.grid import ProcessGrid
from megazero.own.samples import SampleContents
from megazero.own.saved import ParameterShape
from megazero.train.whole_steps import LeftStep

SECTIONS = ("parallel", "optimizer", "offload", "schedule")
"""Settings on which steps depend."""


@dataclass(frozen=True)
class Beginning:
    """From what a run begins without swap files.

    checkpoint  None: from the model's own values
    samples     of the data
    """

    checkpoint: FoundCheckpoint | None
    samples: SampleContents


@dataclass(frozen=True)
class ModelSteps:
    """A `train.whole_steps.StepOwner`.

    inventory  the parameters of each unit
    chunks     the units of each model chunk
    rule       an optimizer of torch in words; "": it is one of ours
    untrained  a digest of frozen parameters and buffers with which the program begins
    """

    run: Run
    grid: ProcessGrid
    inventory: Sequence[Sequence[ParameterShape]]
    chunks: Sequence[range]
    beginning: Beginning
    rule: str
    untrained: int

    @property
    def folders(self) -> Sequence[Path]:
        return [Path(folder) for folder in self.run.offload.nvme_path]

    @property
    def begins(self) -> int:
        checkpoint = self.beginning.checkpoint
        return 0 if checkpoint is None or self.run.checkpoint.finetune else int(checkpoint.progress["steps"])

    @cached_property
    def about(self) -> Mapping[str, Any]:
        sections = run_dict(self.run)
        model = repr(self.inventory)
        where = self.grid.rank, [*self.chunks], self.grid.world.is_on_device
        return {
            "run": {name: sections[name] for name in SECTIONS},
            "layout": self.grid.axes.sizes,
            "optimizer": self.rule,
            # None: what is not trained is the checkpoint's
            "untrained": self.untrained if self.beginning.checkpoint is None else None,
            "model": hashlib.sha256(model.encode()).hexdigest(),
            "contents": hashlib.sha256(repr(where).encode()).hexdigest(),
            "data_plans": asdict(self.beginning.samples),
        }

    def differences(self, left: LeftStep, *, newer: bool) -> tuple[str, Sequence[str]]:
        """See `StepOwner.differences`."""
        then, now = left.about, self.about
        if then.get("model") != now["model"]:
            return "another model", ["other units, names or shapes of parameters"]
        if not newer:
            return "", []
        if changes := [*_changes(then["run"], now["run"])]:
            return "other settings", changes
        if then["optimizer"] != now["optimizer"]:
            return "another optimizer", [f"{then['optimizer']} -> {now['optimizer']}"]
        if then["data_plans"] != now["data_plans"]:
            return "other settings", ["other samples"]
        if now["untrained"] not in (None, then["untrained"]):
            return "another model", ["other values of what is not trained, or from a checkpoint that is gone"]
        if left.path.parent != self.folders[0]:
            return "other folders", [f"{left.path.parent} -> {self.folders[0]}"]
        if then["layout"] != now["layout"] or (left.own and then["contents"] != now["contents"]):
            return "another layout", [f"{then['layout']} -> {now['layout']}"]
        return "", []


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields that differ, with both values."""
    return [
        f"{name} {then.get(section, {}).get(name)} -> {value}"
        for section, fields in now.items()
        for name, value in fields.items()
        if then.get(section, {}).get(name) != value
    ]
