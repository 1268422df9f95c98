"""TensorBoard, for those who have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megazero.telemetry.record import StepRecord

# Which numbers of a step become curves, and the names they go by.
_CURVES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "loss_scale": "train/loss_scale",
    "global_batch_size": "train/global_batch_size",
    "tokens_per_second": "speed/tokens_per_second",
    "model_tflops_per_rank": "speed/model_tflops_per_rank",
    "step_seconds": "speed/step_seconds",
    "peak_memory_bytes": "memory/peak_bytes",
    "mfu": "speed/mfu",
}


class TensorBoard:
    """Writes event files into `folder`. A `Sink`; rank 0 only.

    `first_iteration` is the first one this process runs: what an interrupted run had written from there on is hidden.
    Raises ValueError, with what to install, where TensorBoard is missing.
    """

    def __init__(self, folder: str | Path, first_iteration: int = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("--tensorboard-dir needs TensorBoard, which is not installed: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_iteration if first_iteration > 1 else None)

    def step(self, record: StepRecord) -> None:
        for key, curve in _CURVES.items():
            value = getattr(record, key)
            if value is not None:
                self._writer.add_scalar(curve, value, record.iteration)

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        for name, loss in losses.items():
            self._writer.add_scalar(f"valid/{name.removeprefix('valid_loss').strip('/') or 'loss'}", loss, iteration)

    def note(self, text: str) -> None:
        """Remarks are not curves."""

    def flush(self, durable: bool) -> None:
        if durable:
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
