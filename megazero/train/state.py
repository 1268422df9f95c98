"""The state that training changes. A checkpoint holds it and the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megazero.config.schema import Run
from megazero.model.stage import Stage
from megazero.mpu.fp8 import Fp8
from megazero.mpu.grid import ProcessGrid
from megazero.optim.loss_scale import LossScaler
from megazero.zero.coded import coding_of
from megazero.zero.offload import OpenStores
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.state import ModelState


@dataclass(frozen=True)
class TrainingPosition:
    """How far the run is. A skipped step (of a non-finite gradient or loss) consumes its samples too."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0

    @classmethod
    def read(cls, progress: Mapping[str, Any]) -> TrainingPosition:
        """The position that `TrainState.record` wrote into a checkpoint."""
        return cls(*(int(progress[name]) for name in ("iteration", "consumed_samples", "consumed_tokens")))


@dataclass(frozen=True)
class TrainState:
    """The state of a rank.

    model      parameters, gradients and the optimizer's columns
    optimizer  the sharded optimizer and its step count
    scaler     the loss scale
    fp8        scales of FP8 products; None without --fp8
    """

    model: ModelState
    optimizer: ShardedOptimizer
    scaler: LossScaler
    fp8: Fp8 | None

    def record(self, position: TrainingPosition) -> dict[str, Any]:
        """The `progress` of a checkpoint at this position: everything but the tensors. Waits for the device."""
        return {
            **asdict(position),
            "optimizer_steps": float(self.optimizer.step_count.item()),
            "loss_scale": self.scaler.state_dict(),
            "fp8": None if self.fp8 is None else self.fp8.state_dict(),
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restore the values that `record` returned, except the position."""
        self.optimizer.step_count.fill_(progress["optimizer_steps"])
        self.scaler.load_state_dict(progress["loss_scale"])
        if self.fp8 is not None:
            self.fp8.load_state_dict(progress.get("fp8"))


def build_state(run: Run, grid: ProcessGrid, stages: list[Stage], open_stores: OpenStores | None) -> TrainState:
    """The state that training changes, without values. open_stores: as in `ModelState`. A collective of all ranks where
    columns are placed.
    """
    base = coding_of(run.lora, run.model)
    model = ModelState(stages, grid, run.optimizer, run.parallel, base, run.offload, open_stores)
    optimizer = ShardedOptimizer(model, run.optimizer, grid)
    return TrainState(model, optimizer, LossScaler(run.optimizer, grid.device), stages[0].layout.fp8)
