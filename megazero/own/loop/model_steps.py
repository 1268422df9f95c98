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
from megazero.own.engine_state import ModelContents
from megazero.own.loop.samples import SampleContents
from megazero.own.settings import SECTIONS
from megazero.train.whole_steps import LeftStep, WholeSteps

OF_STEPS = SECTIONS | {"schedule"}
"""Sections of a run on which its steps depend."""


@dataclass(frozen=True)
class Beginning:
    """From what a run begins without swap files.

    checkpoint  None: from the model's own values
    samples     of the data
    """

    checkpoint: FoundCheckpoint | None
    samples: SampleContents


@dataclass
class ModelLoop:
    """A `own.engine_state.StepLoop`. whole_steps: known once the loop is made."""

    beginning: Beginning
    whole_steps: WholeSteps | None = None

    def owner(self, contents: ModelContents) -> ModelSteps:
        return ModelSteps(contents, self.beginning)

    @property
    def keeps_files(self) -> bool:
        return self.whole_steps is not None and self.whole_steps.kept


@dataclass(frozen=True)
class ModelSteps:
    """A `train.whole_steps.StepOwner`."""

    contents: ModelContents
    beginning: Beginning

    @property
    def folders(self) -> Sequence[Path]:
        return [Path(folder) for folder in self.contents.run.offload.nvme_path]

    @property
    def begins(self) -> int:
        checkpoint, how = self.beginning.checkpoint, self.contents.run.checkpoint
        return 0 if checkpoint is None or how.finetune else int(checkpoint.progress["steps"])

    @cached_property
    def about(self) -> Mapping[str, Any]:
        contents, grid = self.contents, self.contents.grid
        model = repr(contents.inventory)
        where = grid.rank, [*contents.chunks], grid.world.is_on_device
        return {
            "run": {name: section for name, section in run_dict(contents.run).items() if name in OF_STEPS},
            "layout": grid.axes.sizes,
            "optimizer": contents.rule,
            # None: what is not trained is the checkpoint's
            "untrained": contents.untrained if self.beginning.checkpoint is None else None,
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
        sections = now["run"].items()
        if changes := [each for name, fields in sections for each in changed(then["run"].get(name, {}), fields)]:
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


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields of a section that differ, with both values."""
    return [f"{name} {then.get(name)} -> {value}" for name, value in now.items() if then.get(name) != value]
