"""Layouts of a loop for DeepSpeed, and its steps with the samples of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero import deepspeed
from tests.deepspeed.models import CLIP, MICRO_BATCHES, SAMPLES, Case

EXACT = 1e-9
HOST, DISK = {"device": "cpu"}, {"device": "nvme"}
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
ZERO: Mapping[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2, host": {"stage": 2, "offload_optimizer": HOST},
    "2, disk": {"stage": 2, "offload_optimizer": DISK},
    "3": SHARDED,
    "3, host": {**SHARDED, "offload_optimizer": HOST, "offload_param": HOST},
    "3, disk": {**SHARDED, "offload_optimizer": DISK, "offload_param": DISK},
}


def config_of(zero: Mapping[str, Any], folder: str, ranks: int, **others: Any) -> dict[str, Any]:
    """A configuration without an optimizer. folder: for files of what goes to disks."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES // ranks,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            name: {**value, "nvme_path": folder} if value == DISK else value for name, value in zero.items()
        },
        **others,
    }


def made_steps(engine: deepspeed.DeepSpeedEngine, case: Case, steps: range) -> list[float]:
    """The mean losses of this rank's micro-batches in steps."""
    losses, here = list[float](), engine.gradient_accumulation_steps()
    for step in steps:
        total = 0.0
        for number in range(engine.global_rank * here, (engine.global_rank + 1) * here):
            loss = engine(*case.micro_batch(step, number))
            engine.backward(loss)
            engine.step()
            total += loss.item() / here
        losses.append(total)
    return losses
