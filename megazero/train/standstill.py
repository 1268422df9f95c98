"""A run whose every step is skipped learns nothing: it ends, and says what is not finite.

A step is skipped where its loss or the norm of its gradients is not finite. A dynamic loss scale falls then, and steps
are counted once it cannot fall any more. The count stays on the device, so that no step waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn

from megazero.checkpoint.agreement import text_of_lowest
from megazero.checkpoint.format import WEIGHT
from megazero.checkpoint.narrowing import OutOfRange
from megazero.config.dtypes import compute_dtype
from megazero.config.schema import OptimizerConfig, Run
from megazero.config.source import ConfigError
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import spec_of
from megazero.train.state import TrainState


@dataclass
class SkippedSteps:
    """The steps that were skipped in a row at the least loss scale.

    most      --max-skipped-steps; 0: any number
    least     the least loss scale; None: the scale is constant
    in_a_row  0-dim int64 on the device
    """

    most: int
    least: float | None
    in_a_row: Tensor

    @classmethod
    def of(cls, cfg: OptimizerConfig, device: torch.device) -> SkippedSteps:
        dynamic = cfg.precision == "fp16" and cfg.loss_scale is None
        least = cfg.min_loss_scale if dynamic else None
        return cls(cfg.max_skipped_steps, least, torch.zeros((), dtype=torch.int64, device=device))

    def add(self, skipped: Tensor, scale: Tensor) -> None:
        """Count a step. skipped: 0-dim bool; scale: 0-dim, of its loss; both on the device, the same on each rank."""
        # A skip above the least loss scale is how a dynamic scale finds its value.
        counts = skipped if self.least is None else skipped & (scale <= self.least)
        self.in_a_row = torch.where(counts, self.in_a_row + 1, 0)

    def now(self) -> int:
        """The steps that were skipped up to now. Waits for the device."""
        return int(self.in_a_row.item())

    def since(self, iteration: int) -> str | None:
        """The iteration in words, if it and perhaps some before it changed no weight: a checkpoint of it would hold the
        weights that an earlier one has, or that nobody wants, and --keep-last would delete a good one for it. None if
        it changed them. Waits for the device.
        """
        number = self.now()
        if number < 2:
            return f"iteration {iteration}, which changed no weight," if number else None
        return f"iteration {iteration}, whose last {number} steps changed no weight,"

    def are_too_many(self) -> bool:
        """Whether the run is to end. Waits for the device."""
        return self.most > 0 and self.now() >= self.most

    def spoil_the_end(self, steps: int) -> bool:
        """Whether a run that has made so many steps ends without having learned anything: in several skipped steps in
        a row, or in its only one. Waits for the device.
        """
        return self.most > 0 and self.now() >= min(2, max(1, steps))


def standstill_text(
    run: Run,
    grid: ProcessGrid,
    state: TrainState,
    skipped: SkippedSteps,
    stages: Sequence[nn.Module],
    evaluate: Callable[[], object],
) -> str:
    """Why the run ends, for one message. evaluate: the forward passes of a step without gradients, on all ranks.

    A collective of all ranks.
    """
    number, precision = skipped.now(), run.optimizer.precision
    steps = "step was" if number == 1 else f"{number} steps were"
    least = " at the least loss scale" * (precision == "fp16")
    told = f"--max-skipped-steps {skipped.most}: the last {steps} skipped{least}, and nothing was learned"
    weight = bad_weight_anywhere(run, grid, state)
    if weight is not None:
        return f"{told}: {weight}"
    with first_overflow(stages) as found:
        evaluate()
    module = _first(grid, found[0] if found else None)
    if module is not None:
        ends = _end_of(precision)
        return f"{told}: weights are finite, and {module} is the first module whose output is not ({ends})"
    return f"{told}: weights and the forward pass are finite, and gradients are not ({_end_of(precision)})"


def require_finite_weights(run: Run, grid: ProcessGrid, state: TrainState) -> None:
    """Raise ConfigError on all ranks if a weight is not finite in the run's precision. A collective of all ranks."""
    weight = bad_weight_anywhere(run, grid, state)
    if weight is not None:
        checkpoint = run.checkpoint
        where = f"--init-from {checkpoint.init_from}" if checkpoint.init_from else f"--load {checkpoint.load}"
        raise ConfigError([f"{where}: {weight}"])


def bad_weight_anywhere(run: Run, grid: ProcessGrid, state: TrainState) -> str | None:
    """The first weight of all ranks that is not finite in the run's precision, in words. A collective of all ranks."""
    return _first(grid, _bad_weight(state, compute_dtype(run.optimizer.precision)))


def _bad_weight(state: TrainState, dtype: torch.dtype) -> str | None:
    """The first weight that this rank owns which is not finite in the dtype. All portions are looked at, since bringing
    them is a collective.
    """
    complaint = None
    for portion in state.optimizer.portions():
        for fragment in portion:
            weight = fragment.columns[WEIGHT]
            if complaint is None and not (finite := weight.to(dtype).isfinite()).all():
                number = weight[~finite][0].item()
                name = fragment.spec.name
                beyond = f"{OutOfRange(name, number, dtype)}; nearest: --precision bf16"
                # A number that fp16 cannot hold is finite in the master weights.
                complaint = beyond if math.isfinite(number) else f"{name} holds {number:g}"
    return complaint


@contextmanager
def first_overflow(stages: Sequence[nn.Module]) -> Iterator[list[str]]:
    """While it is open, the first module of these stages that gives what is not finite is put into the list, by the
    names of its parameters.
    """
    overflowed: list[str] = []

    def look(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, given: object, output: object) -> None:
            if (
                not overflowed
                and isinstance(output, Tensor)
                and output.is_floating_point()
                and not output.isfinite().all()
            ):
                overflowed.append(name)

        return hook

    modules = [module for stage in stages for module in stage.modules()]
    named = [(module, _name_of(module)) for module in modules]
    handles = [module.register_forward_hook(look(name)) for module, name in named if name]
    try:
        yield overflowed
    finally:
        for handle in handles:
            handle.remove()


def _name_of(module: nn.Module) -> str:
    """What the names of a module's parameters have in common; empty for a module without parameters."""
    names = [spec_of(parameter).name.split(".")[:-1] for parameter in module.parameters()]
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return ".".join(parts[0] for parts in same)


def _first(grid: ProcessGrid, text: str | None) -> str | None:
    """The text of the lowest rank that has one. A collective of the world."""
    told = text_of_lowest(grid.world, grid.device, text)
    return None if told is None else told[1]


def _end_of(precision: str) -> str:
    return f"{precision} ends at {torch.finfo(compute_dtype(precision)).max:.3g}"
