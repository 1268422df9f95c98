"""The TensorBoard sink. TensorBoard is optional."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megazero.telemetry.record import StepRecord

# Field of StepRecord -> name of its curve.
_CURVES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "loss_scale": "train/loss_scale",
    "global_batch_size": "train/global_batch_size",
    "tokens_per_second": "speed/tokens_per_second",
    "model_tflops_per_rank": "speed/model_tflops_per_rank",
    "hardware_tflops_per_rank": "speed/hardware_tflops_per_rank",
    "step_seconds": "speed/step_seconds",
    "peak_memory_bytes": "memory/peak_bytes",
    "mfu": "speed/mfu",
}


class TensorBoard:
    """Writes event files into `folder`. A `Sink`; rank 0 only.

    first_iteration  first step of this process. TensorBoard hides later points of an interrupted run
    tell             called with a warning when the files cannot be written (a full disk). The curves end there and the
                     run goes on, since TensorBoard's writer does not work after a failure

    Raises ValueError with what to install if TensorBoard is missing.
    """

    def __init__(self, folder: str | Path, first_iteration: int = 1, tell: Callable[[str], None] = print) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "--tensorboard-dir needs TensorBoard, which is not installed: pip install tensorboard"
            ) from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_iteration if first_iteration > 1 else None)
        self._folder, self._tell = folder, tell

    def step(self, record: StepRecord) -> None:
        values = {curve: getattr(record, key) for key, curve in _CURVES.items()}
        self._draw({curve: value for curve, value in values.items() if value is not None}, record.iteration)

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        self._draw({_curve_of(name): loss for name, loss in losses.items()}, iteration)

    def note(self, text: str) -> None:
        """Does nothing: remarks are not written to event files."""

    def flush(self, durable: bool) -> None:
        if durable:
            self._trying(lambda: self._writer.flush())

    def close(self) -> None:
        self._trying(lambda: self._writer.close())

    def _draw(self, values: dict[str, float], iteration: int) -> None:
        def draw() -> None:
            for curve, value in values.items():
                self._writer.add_scalar(curve, value, iteration)

        self._trying(draw)

    def _trying(self, action: Callable[[], None]) -> None:
        if self._writer is None:
            return
        try:
            action()
        except OSError as error:
            self._tell(
                f"WARNING: TensorBoard's files in {self._folder} cannot be written: {error}. Its curves end here"
            )
            self._writer = None


def _curve_of(name: str) -> str:
    """Name of a loss's curve: valid_loss -> valid/loss, valid_loss/NAME -> valid/NAME, test_loss -> test/loss."""
    kind, _, rest = name.partition("_")
    return f"{kind}/{rest.removeprefix('loss/')}"
