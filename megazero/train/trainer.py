"""The loop: step, evaluate, save, stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megazero.config.derive import updates_early
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.loader import Batches, Loader
from megazero.mpu import collectives
from megazero.mpu.fp8 import Fp8
from megazero.mpu.grid import ProcessGrid, uncounted
from megazero.optim.step_plan import StepPlan
from megazero.pipeline.build import compiled_ops
from megazero.pipeline.engine import PipelineEngine, StepEngine
from megazero.telemetry.record import FINISHED, Ending
from megazero.telemetry.steplog import StepLog, StepValues
from megazero.telemetry.watchdog import StopSignals, parent_alive, started_by_torchrun
from megazero.train.run_memory import HostMemory
from megazero.train.save_policy import SavePolicy, unsaved
from megazero.train.standstill import SkippedSteps, standstill_text
from megazero.train.state import TrainingPosition, TrainState
from megazero.train.whole_steps import WholeSteps
from megazero.zero.actions import UpdateValues
from megazero.zero.optimizer import OwedStepEnd, TrainingStepEnd


@dataclass
class Trainer:
    """The training loop of one rank. `fit` runs it; `steps` is a generator whose caller runs it.

    save_policy  saves the state; None: the run saves nothing
    position     the present position; replaced after each step
    deadline     `time.monotonic()` at which the run saves and stops; None: no limit
    signals      requests to stop; the entry point installs the handlers
    whole_steps  has each step become whole on disks, or none
    """

    run: Run
    grid: ProcessGrid
    engine: StepEngine
    state: TrainState
    batches: Batches
    log: StepLog
    save_policy: SavePolicy | None
    position: TrainingPosition
    deadline: float | None
    signals: StopSignals
    whole_steps: WholeSteps
    memory: HostMemory
    plan: StepPlan = field(init=False)
    asked_to_stop: Tensor = field(init=False)
    losses: dict[str, float] = field(default_factory=dict)
    """The losses of the newest evaluation, by metric name."""
    stopped_by: str | None = None
    """Why the run stopped before its end; None while it goes on."""
    steps_here: int = 0
    first_seconds: float = 0.0
    was_clipped: bool = True
    """Whether the last step's gradient was clipped, or the step skipped: the next one may be, so that early updates
    would be made twice. Nothing is known of a first step. Kept with --early-update only.
    """
    skipped: SkippedSteps = field(init=False)
    updates_early: bool = field(init=False)
    """Whether some rank has a part that may be updated before the norm; the same on all ranks."""

    def __post_init__(self) -> None:
        self.plan = StepPlan(self.run.schedule)
        self.asked_to_stop = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        self.skipped = SkippedSteps.of(self.run.optimizer, self.grid.device)
        asked = updates_early(self.run.parallel, self.run.offload)
        (parts,) = self.reduce(float(len(self.state.model.shape.early))) if asked else (0.0,)
        self.updates_early = bool(parts)
        if asked and not self.updates_early:
            self.log.note(
                "--early-update: no gradient is complete before the end of a step in this layout, so that all updates "
                "are on time; with --sequence-parallel, --offload-gradients cpu completes them earlier"
            )

    def fit(self) -> None:
        """Train until the run is finished or stops for another reason; in both cases the state is saved."""
        for _ in self.steps():
            pass
        self.at_the_end()

    def steps(self) -> Iterator[StepValues]:
        """Train one step for each item taken, with evaluations and saves at their intervals.

        The generator ends when the run is finished or stops. The caller then calls `at_the_end`.
        """
        if self.finished():
            self.log.note(self.plan.at_end(self.position.iteration, self.position.consumed_samples))
        elif self.run.trainer.eval_at_start and self.batches.valid:
            self.evaluate()
        elif self.run.trainer.eval_at_start:
            self.log.note("--eval-at-start: this run has no data to evaluate on")
        while not self.finished() and self.stopped_by is None:
            step = self.train_step(
                stop=self.signals.raised or (self.save_policy is not None and self.save_policy.superseded)
            )
            self.require_progress()
            self.after_step()
            yield step
            self.stopped_by = self.stop_reason()
            if self.stopped_by is not None:
                self.log.note(f"stopping: {self.stopped_by}{unsaved(self.run, self.save_policy)}")

    def finished(self) -> bool:
        """Whether the run has trained all its iterations or samples."""
        return self.plan.finished(self.position.iteration, self.position.consumed_samples)

    @property
    def ending(self) -> Ending:
        """How the run ends, if it ends now."""
        return FINISHED if self.finished() else Ending("stopped", self.stopped_by or "its program left the loop")

    def train_step(self, *, stop: bool) -> StepValues:
        """Make one optimizer step over one global batch; return its values, some of them 0-dim tensors on the device.

        Backward computes gradients of loss_scale * (summed loss) / (positions of the global batch). The loss mask may
        leave fewer tokens than positions, and ranks may have different numbers of them. The step's packed all-reduce
        sums the tokens over all ranks, and the optimizer multiplies the gradients by positions / (tokens * loss_scale).
        So the result is exact, and the count needs no message of its own.

        With --late-update the list makes the updates of the step before, and leaves its own (`settle`). With
        --early-update it makes some before the norm, and maybe again (`check_early`).

        stop: whether this rank requests a stop. A collective of all ranks: the engine's messages, gradient reductions,
        one all-reduce of four float64, and gathers of parameters.
        """
        began = time.perf_counter()
        now = self.plan.after(self.position.iteration, self.position.consumed_samples)
        size = now.global_batch_size
        # Not tokens: how many of these count is known on all ranks only behind the packed all-reduce.
        positions = size * self.positions_of_sample
        batches = self.batches.train.micro_batches(now.consumed_before, size)
        if not self.plan.finished(now.iteration, now.consumed_samples):
            self.batches.train.prefetch(now.consumed_samples, self.plan.batches.size(now.consumed_samples))
        scale = self.state.scaler.scale  # of this step: `update` puts another tensor in its place
        began += self.warm_up(batches, scale / positions)  # no part of the step's seconds
        self.state.model.messages.begin_step(scale / positions)
        if self.state.fp8 is not None:
            self.state.fp8.begin()
        owed = self.state.model.owed.take()
        end = self.end_of_step(self.count(batches), now.lr, positions, scale, stop=stop, owed=owed)
        # The engine, not this function, calls `end`: at NORM and UPDATE of the list, beside which messages travel.
        self.engine.train(batches, scale / positions, end, owed=owed is not None, early=end.early)
        updated_again = self.check_early(end) if self.updates_early else None
        if self.run.parallel.late_update and end.values is not None:
            self.state.model.owed.leave(end.values, self.settle)
        self.state.optimizer.end_step(end.bad)
        self.state.scaler.update(end.bad)
        self.skipped.add(end.bad, scale)
        if self.state.fp8 is not None:
            self.first_scales(self.state.fp8, end.bad)
        self.asked_to_stop = end.asked  # stays on the device: `stop_reason` reads it where the step may be waited for
        self.batches.train.upload()
        self.position = TrainingPosition(now.iteration, now.consumed_samples, self.position.consumed_tokens + positions)
        seconds = time.perf_counter() - began
        values = StepValues(
            iteration=self.position.iteration,
            consumed_samples=self.position.consumed_samples,
            consumed_tokens=self.position.consumed_tokens,
            loss=end.loss_sum / end.all_tokens,
            grad_norm=end.grad_norm,
            lr=now.lr,
            loss_scale=scale,
            skipped=end.bad,
            global_batch_size=size,
            step_seconds=seconds,
            updated_again=updated_again,
        )
        self.log.step(values)
        self.log_compilation_time(seconds)
        self.whole_steps.leave(self.state, self.position, self.log)
        return values

    def end_of_step(
        self,
        tokens: Tensor | float,
        lr: float,
        positions: int,
        scale: Tensor,
        *,
        stop: bool,
        owed: UpdateValues | None,
    ) -> TrainingStepEnd:
        """What the engine calls at NORM and UPDATE of a step's list. Before early updates a collective of all ranks: an
        all-reduce of their tokens, which the norm would tell too late.
        """
        early = self.updates_early and not self.was_clipped
        return TrainingStepEnd(
            optimizer=self.state.optimizer,
            reduce=self.reduce_once,
            lr=lr,
            positions=positions,
            scale=scale,
            clip_grad=self.run.optimizer.clip_grad,
            tokens=tokens,
            reports=self.reports_loss,
            stops=lambda: stop or (self.deadline is not None and time.monotonic() >= self.deadline),
            early_tokens=self.reduce(tokens)[0] if early else None,
            values=owed,
            groups=self.groups_at(lr),
        )

    def groups_at(self, lr: float) -> tuple[Mapping[str, Any], ...]:
        """The options of groups of parameters in a step with this learning rate; (): all have the same."""
        return ()

    def check_early(self, end: TrainingStepEnd) -> bool | None:
        """Make the early updates again if the norm was too large for them, or not finite. Waits for the norm.

        Returns whether they were; None: the step had no early updates. A collective of all ranks if they are made.
        """
        clipped = self.was_clipped = bool(end.clipped)
        if not end.early:
            return None
        if clipped:
            end.update_again(self.settle)
        return clipped

    def settle(self, values: UpdateValues) -> None:
        """Make the updates that the last step has left, or made too early. A collective of all ranks."""
        self.engine.settle(OwedStepEnd(self.state.optimizer, values))

    def first_scales(self, fp8: Fp8, skipped: Tensor) -> None:
        """End FP8's step. Once scales come from histories other code may compute, and the engine warms up again."""
        knew = fp8.knows_scales
        fp8.end(skipped)
        if fp8.knows_scales != knew and self.run.parallel.compile and isinstance(self.engine, PipelineEngine):
            self.engine.cool()

    def warm_up(self, batches: Sequence[Any], loss_factor: Tensor) -> float:
        """Run the step without messages first, if the engine needs that (`PipelineEngine.warm_up`); return the seconds.

        It leaves no trace: gradients are forgotten, FP8 begins its step anew, the bytes are not counted as traffic.
        """
        if not isinstance(self.engine, PipelineEngine) or self.engine.is_warm[True]:
            return 0.0
        began, grid = time.perf_counter(), self.grid
        self.state.model.owed.settle()
        if self.state.fp8 is not None:
            self.state.fp8.begin()
        with uncounted(*grid.step_groups):
            self.engine.warm_up(batches, loss_factor)
            self.state.model.reducer.discard()
            self.state.model.mover.discard()
        return time.perf_counter() - began

    def reduce_once(self, *values: Tensor | float) -> list[Tensor]:
        """`reduce` of a training step, once the step before is whole on this rank's disks."""
        self.whole_steps.wait()
        sums = self.reduce(*values)
        self.signals.begin()  # not before the first reduction: until then a signal may end a rank and nothing is lost
        return sums

    def reduce(self, *values: Tensor | float) -> list[Tensor]:
        """The sum of each value over all ranks, as 0-dim float64 tensors; one all-reduce of the world."""
        return collectives.sums(values, self.grid.world, self.grid.device)

    @property
    def positions_of_sample(self) -> int:
        """By how many tokens a sample counts, whether a loss mask leaves them out or not."""
        return self.run.model.seq_length

    def count(self, batches: list[Any]) -> Tensor | float:
        """The number of unmasked tokens of these micro-batches; 0 on ranks that do not report the loss."""
        if not self.reports_loss:
            return 0.0
        # Sums stay on the device, and the host does not wait for them.
        counts = [batch.labels.numel() if batch.loss_mask is None else batch.loss_mask.sum() for batch in batches]
        return sum(counts, start=torch.zeros((), dtype=torch.float64, device=self.grid.device))

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss enters the sum over ranks. All tp ranks of the stage with the head have the same
        loss, so only the first of them reports it.
        """
        return self.engine.has_loss and self.grid.at.tp == 0

    def require_progress(self) -> None:
        """Raise ConfigError on all ranks if too many steps were skipped in a row. Nothing is saved after them."""
        # Ahead of a save on a step that is not logged too, or the save would come first.
        if (self.waits_for_device or self.is_at(self.run.checkpoint.save_interval)) and self.skipped.are_too_many():
            raise self.standstill()

    def standstill(self) -> ConfigError:
        """The error of a run that learns nothing any more. A collective of all ranks."""
        size = self.run.schedule.global_batch_size
        batches = self.batches.train.micro_batches(self.position.consumed_samples - size, size)
        self.log.flush()
        parts = self.run, self.grid, self.state, self.skipped, self.engine.stages
        return ConfigError([standstill_text(*parts, lambda: self.engine.evaluate(batches))])

    def is_at(self, interval: int | None) -> bool:
        """Whether the present iteration is a multiple of an interval; never of 0 or None."""
        return interval is not None and interval > 0 and self.position.iteration % interval == 0

    @property
    def waits_for_device(self) -> bool:
        """Whether this step may be waited for: on a CPU each, on a card those that are logged."""
        return self.grid.device.type == "cpu" or self.is_at(self.run.trainer.log_interval)

    def after_step(self) -> None:
        """Evaluate and save if the position is at an interval. A collective of all ranks."""
        self.steps_here += 1
        self.memory.limit(self.steps_here)
        if self.save_policy is not None:
            self.save_policy.poll()
        if self.is_at(self.run.trainer.eval_interval) and not self.finished():  # a finished run: `at_the_end`
            self.evaluate()
        if self.is_at(self.run.checkpoint.save_interval):
            unchanged = self.skipped.since(self.position.iteration)
            if unchanged is None or self.save_policy is None:
                self.save(last=False)
            else:
                self.log.note(f"{unchanged} is not saved")

    def log_compilation_time(self, seconds: float) -> None:
        """Log once, if --compile compiles anything, the seconds of the first step (with compilation) and the second."""
        if self.steps_here == 0:
            self.first_seconds = seconds
        elif self.steps_here == 1 and compiled_ops(self.run, self.grid.device):
            self.log.note(
                f"--compile: the first step took {self.first_seconds:.1f} s with compilation, the second "
                f"{seconds:.1f} s"
            )

    def stop_reason(self) -> str | None:
        """Why all ranks stop after this step; None if they go on.

        The step's reduction has carried the requests of all ranks. Raises RuntimeError if the launcher has died.
        """
        # One rank that was started by hand has no launcher: its parent is a shell, which it may outlive (nohup).
        launched = started_by_torchrun() or self.grid.world.size > 1
        if launched and not parent_alive():
            raise RuntimeError("the launcher of this rank has died; stopping without saving")
        # All ranks know this interval, so that no rank has to ask the device.
        if self.is_at(self.run.trainer.exit_interval):
            return f"--exit-interval {self.run.trainer.exit_interval}"
        if not self.waits_for_device:
            return None
        return (self.signals.name or self.remote_stop_reason()) if self.asked_to_stop.item() > 0 else None

    def remote_stop_reason(self) -> str:
        """Why all ranks stop, on a rank that received no signal: its deadline, a lost fence, or another rank."""
        minutes = self.run.trainer.exit_duration_in_mins
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return f"--exit-duration-in-mins {minutes:g} has passed"
        if self.save_policy is not None and self.save_policy.superseded:
            return "the folder of checkpoints is another job's now, or gone"
        return "another rank was asked to"

    def at_the_end(self) -> None:
        """Evaluate a finished run, with --test-iters on the test part too; save if the position is not saved yet.

        If this process has trained no step, neither. Raises ConfigError on all ranks if the last steps of a finished
        run were skipped. A collective of all ranks.
        """
        if self.steps_here:
            self.state.model.wait_parameters()
            self.whole_steps.wait()
            if self.finished() and self.batches.valid:
                self.evaluate()
            if self.finished() and self.batches.test:
                self._evaluate(self.batches.test, self.run.trainer.test_iters)
            if not (self.finished() and self.skipped.now() == self.steps_here):  # else there is nothing new to save
                self.save(last=True)
            self.log.flush()
        # Only now, when the checkpoint is complete, is no step on disks needed any more.
        saved = self.save_policy is not None and self.save_policy.saved_at == self.position.iteration
        self.whole_steps.end(self.position, self.log, needed=not (saved or self.finished()))
        if self.steps_here and self.finished() and self.skipped.spoil_the_end(self.steps_here):
            raise self.standstill()

    def save(self, *, last: bool) -> None:
        """Save, unless this position is saved already. last: return only when it is on disk. A collective of all
        ranks.
        """
        if self.save_policy is None:
            return
        self.log.flush()
        self.state.model.wait_parameters()
        if last:
            self.save_policy.finish(self.position)
        else:
            self.save_policy.save(self.position)

    def evaluate(self) -> dict[str, float]:
        """Compute and log the mean loss per token of each validation set, by metric name.

        Each evaluation uses the same `--eval-iters` global batches. A collective of all ranks.
        """
        return self._evaluate(self.batches.valid, self.run.trainer.eval_iters)

    def _evaluate(self, sets: Mapping[str, Loader[Any]], iterations: int) -> dict[str, float]:
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

    def loss_of(self, batches: list[Any]) -> Tensor | float:
        """The summed loss of these micro-batches without gradients; 0 on ranks that do not report the loss."""
        loss = self.engine.evaluate(batches)
        return loss if self.reports_loss else 0.0
