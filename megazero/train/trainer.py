"""The loop: step, evaluate, save, stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.config.schema import Run
from megazero.data.loader import TrainLoader
from megazero.model.batch import MicroBatch
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.optim.clip import clip_coefficient
from megazero.optim.step_plan import StepPlan
from megazero.pipeline.build import compiled_ops
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.graphs import GraphedEngine
from megazero.system import device as devices
from megazero.telemetry.steplog import StepLog, StepValues
from megazero.telemetry.watchdog import StopSignals, parent_alive
from megazero.train.batches import Batches
from megazero.train.save_policy import SavePolicy
from megazero.train.state import TrainingPosition, TrainState

GROWTH = 1.25
"""Memory that the host's allocator hoards is returned once a rank holds so much more than after its second step, or
little is left.
"""


@dataclass
class Trainer:
    """What one rank needs to run the loop; `fit` runs it, `steps` gives it into the caller's hand.

    save_policy  keeps the state of the run at the current position; None: nothing is kept
    position     from which it goes on; replaced after each step
    deadline     `time.monotonic()` at which the run saves and stops
    signals      whether a signal has asked the run to stop; handlers are the entry point's
    """

    run: Run
    grid: ProcessGrid
    engine: PipelineEngine | GraphedEngine
    state: TrainState
    batches: Batches
    log: StepLog
    save_policy: SavePolicy | None
    position: TrainingPosition
    deadline: float | None
    signals: StopSignals
    plan: StepPlan = field(init=False)
    asked_to_stop: Tensor = field(init=False)
    losses: dict[str, float] = field(default_factory=dict)
    """Of the newest evaluation, by metric name."""
    stopped_by: str | None = None
    """Why the run stopped before its end, in words."""
    steps_here: int = 0
    first_seconds: float = 0.0
    usual_memory: int = 0

    def __post_init__(self) -> None:
        self.plan = StepPlan(self.run.schedule)
        self.asked_to_stop = torch.zeros((), dtype=torch.float64, device=self.grid.device)

    def fit(self) -> None:
        """Train to the end, or to the first reason to stop; whatever the reason, the state is saved."""
        for _ in self.steps():
            pass
        self.at_the_end()

    def steps(self) -> Iterator[StepValues]:
        """Train one step for each item taken, evaluations and saves at their intervals included, to the end of the run
        or the first reason to stop. `at_the_end` is the caller's to call.
        """
        if self.finished():
            self.log.note(f"nothing left to train: iteration {self.position.iteration} is the run's last")
        while not self.finished() and self.stopped_by is None:
            step = self.train_step(
                stop=self.signals.raised or (self.save_policy is not None and self.save_policy.superseded)
            )
            self.after_step()
            yield step
            self.stopped_by = self.why_stop()
            if self.stopped_by is not None:
                self.log.note(f"stopping: {self.stopped_by}")

    def finished(self) -> bool:
        """Whether the run has all its iterations or samples."""
        return self.plan.finished(self.position.iteration, self.position.consumed_samples)

    def train_step(self, *, stop: bool) -> StepValues:
        """One optimizer step over one global batch; its numbers, of which some may lie on the device.

        Every rank's gradients are those of the summed loss divided by the positions of the global batch; how many of
        those count (masks) is known once all ranks have said so, in the step's one packed reduction, and enters the
        multiplier that the optimizer applies: exact with unequal numbers of valid tokens, and no message of its own.
        """
        began = time.perf_counter()
        now = self.plan.after(self.position.iteration, self.position.consumed_samples)
        size, positions = now.global_batch_size, now.global_batch_size * self.run.model.seq_length
        batches = self.batches.train.micro_batches(now.consumed_before, size)
        if not self.plan.finished(now.iteration, now.consumed_samples):
            self.batches.train.prefetch(now.consumed_samples, self.plan.batches.size(now.consumed_samples))
        scale = self.state.scaler.scale.clone()
        if self.state.fp8 is not None:
            self.state.fp8.begin()
        loss_sum = self.engine.train(batches, scale / positions, self.state.model.reducer)
        self.state.optimizer.finish_reduction()
        late = self.deadline is not None and time.monotonic() >= self.deadline
        loss = loss_sum if self.reports_loss else 0.0
        squares, loss_sum, tokens, asked = self.reduce(
            self.state.optimizer.sum_of_squares(), loss, self.count(batches), float(stop or late)
        )
        self.signals.begin()  # not earlier: until ranks have met here, each may leave by itself and loses nothing
        unscale = positions / (tokens * scale)
        norm = squares.sqrt() * unscale
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss_sum))
        self.state.optimizer.step(now.lr, unscale * clip_coefficient(norm, self.run.optimizer.clip_grad), bad)
        self.state.scaler.update(bad)
        if self.state.fp8 is not None:
            self.state.fp8.end(bad)
        self.asked_to_stop = asked
        self.batches.train.upload()
        self.position = TrainingPosition(now.iteration, now.consumed_samples, self.position.consumed_tokens + positions)
        seconds = time.perf_counter() - began
        values = StepValues(
            iteration=self.position.iteration,
            consumed_samples=self.position.consumed_samples,
            consumed_tokens=self.position.consumed_tokens,
            loss=loss_sum / tokens,
            grad_norm=norm,
            lr=now.lr,
            loss_scale=scale,
            skipped=bad,
            global_batch_size=size,
            step_seconds=seconds,
        )
        self.log.step(values)
        self.tell_compilation(seconds)
        return values

    def reduce(self, *values: Tensor | float) -> list[Tensor]:
        """Each value's sum over all ranks, in one message, in float64.

        The host waits for no device: numbers are filled in, not copied.
        """
        packed = torch.stack([self.wide(value) for value in values])
        collectives.all_reduce(packed, self.grid.world).wait()
        return list(packed.unbind())

    def wide(self, value: Tensor | float) -> Tensor:
        """0-dim float64 on the device."""
        if isinstance(value, Tensor):
            return value.to(self.grid.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self.grid.device)

    def count(self, batches: list[MicroBatch]) -> Tensor | float:
        """Predictions that count in these micro-batches, on the ranks whose loss does (see `reports_loss`), else 0."""
        if not self.reports_loss:
            return 0.0
        counts = [batch.labels.numel() if batch.loss_mask is None else batch.loss_mask.sum() for batch in batches]
        return sum(counts, start=torch.zeros((), dtype=torch.float64, device=self.grid.device))

    @property
    def reports_loss(self) -> bool:
        """Every tp rank of the stage with the head knows the same loss; the first of them counts."""
        return self.engine.has_loss and self.grid.at.tp == 0

    def after_step(self) -> None:
        """Evaluate and save where the run asks for it."""
        self.limit_memory()
        if self.save_policy is not None:
            self.save_policy.look()
        every, iteration = self.run.trainer.eval_interval, self.position.iteration
        if every and iteration % every == 0 and not self.finished():
            self.evaluate()
        every = self.run.checkpoint.save_interval
        if every and iteration % every == 0:
            self.save(last=False)

    def limit_memory(self) -> None:
        """Keep the host's heap from growing without end; what a step frees stays for the next, for fresh pages are
        slow.
        """
        self.steps_here += 1
        if self.grid.device.type != "cpu":
            return
        held = devices.memory_bytes(self.grid.device)
        if self.steps_here <= 2:
            self.usual_memory = held
        elif held > GROWTH * self.usual_memory or devices.host_memory_is_short():
            devices.return_free_memory(self.grid.device)

    def tell_compilation(self, seconds: float) -> None:
        """Where --compile compiles something, once: what the first step took with compilation, and
        the second without.
        """
        if self.steps_here == 0:
            self.first_seconds = seconds
        elif self.steps_here == 1 and compiled_ops(self.run, self.grid.device):
            self.log.note(
                f"--compile: the first step took {self.first_seconds:.1f} s with compilation, the second "
                f"{seconds:.1f} s"
            )

    def why_stop(self) -> str | None:
        """Why all ranks stop after this step, if they do; what one of them learned travelled with its scalars."""
        if not parent_alive():
            raise RuntimeError("the launcher of this rank has died; stopping without saving")
        every = self.run.trainer.exit_interval
        if every and self.position.iteration % every == 0:
            return f"--exit-interval {every}"
        on_host = self.grid.device.type == "cpu"
        if not on_host and self.position.iteration % self.run.trainer.log_interval:
            return None  # reading the flag waits for the device
        return (self.signals.name or self.why_asked()) if self.asked_to_stop.item() > 0 else None

    def why_asked(self) -> str:
        """Why all ranks stop where no signal came to this one: its own clock, or what another rank was told."""
        minutes = self.run.trainer.exit_duration_in_mins
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return f"--exit-duration-in-mins {minutes:g} has passed"
        if self.save_policy is not None and self.save_policy.superseded:
            return "the folder of checkpoints is another job's now, or gone"
        return "another rank was asked to"

    def at_the_end(self) -> None:
        """Evaluate a finished run, on the test part where that is asked for; save whatever is not saved.

        Where nothing was left to train there is nothing to do.
        """
        if self.steps_here == 0:
            return
        if self.finished() and self.batches.valid:
            self.evaluate()
        if self.finished() and self.batches.test:
            self._evaluate(self.batches.test, self.run.trainer.test_iters)
        self.save(last=True)
        self.log.flush()

    def save(self, *, last: bool) -> None:
        """Save, unless this very position is saved already; the last save of a run returns when it is on disk."""
        if self.save_policy is None:
            return
        self.log.flush()
        self.state.model.wait_parameters()
        if last:
            self.save_policy.finish(self.position)
        else:
            self.save_policy.save(self.position)

    def evaluate(self) -> dict[str, float]:
        """Mean loss of every validation set over `--eval-iters` global batches, always the same ones. Logged."""
        return self._evaluate(self.batches.valid, self.run.trainer.eval_iters)

    def _evaluate(self, sets: Mapping[str, TrainLoader], iterations: int) -> dict[str, float]:
        size = self.run.schedule.global_batch_size
        losses = {}
        for name, loader in sets.items():
            totals = torch.zeros(2, dtype=torch.float64, device=self.grid.device)
            for step in range(iterations):
                batches = loader.micro_batches(step * size, size)
                totals += torch.stack(self.reduce(self.loss_of(batches), self.count(batches)))
            losses[name] = float(totals[0] / totals[1])
        self.losses |= losses
        self.log.evaluation(self.position.iteration, losses)
        return losses

    def loss_of(self, batches: list[MicroBatch]) -> Tensor | float:
        """Summed loss of these micro-batches without gradients, on the ranks that report it."""
        loss = self.engine.evaluate(batches)
        return loss if self.reports_loss else 0.0
