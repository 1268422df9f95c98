"""What training changes, and how far it is: all that a checkpoint keeps of a run beside its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megazero.mpu.fp8 import Fp8
from megazero.optim.loss_scale import LossScaler
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.state import ModelState


@dataclass(frozen=True)
class TrainingPosition:
    """How far the run is. A step that is skipped (non-finite gradient) consumes its samples all the same."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0

    @classmethod
    def read(cls, progress: Mapping[str, Any]) -> TrainingPosition:
        """The position that `TrainState.record` wrote into a checkpoint."""
        return cls(*(int(progress[name]) for name in ("iteration", "consumed_samples", "consumed_tokens")))


@dataclass(frozen=True)
class TrainState:
    """What a rank holds of the model and its training.

    model   parameters, gradients and the optimizer's columns, which a checkpoint keeps as tensors
    fp8     scales of FP8 products; None without --fp8
    """

    model: ModelState
    optimizer: ShardedOptimizer
    scaler: LossScaler
    fp8: Fp8 | None

    def record(self, position: TrainingPosition) -> dict[str, Any]:
        """What a checkpoint of this position says beside the tensors. Waits for the device."""
        return {
            **asdict(position),
            "optimizer_steps": float(self.optimizer.step_count.item()),
            "loss_scale": self.scaler.state_dict(),
            "fp8": None if self.fp8 is None else self.fp8.state_dict(),
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Take back what `record` gave; the tensors have been loaded."""
        self.optimizer.step_count.fill_(progress["optimizer_steps"])
        self.scaler.load_state_dict(progress["loss_scale"])
        if self.fp8 is not None:
            self.fp8.load_state_dict(progress.get("fp8"))
