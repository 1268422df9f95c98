"""The engine that a program for DeepSpeed calls."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from megazero.checkpoint.agreement import attempt_on_all_ranks, broadcast_text, found_by_rank_0
from megazero.checkpoint.manager import FoundCheckpoint, find_on_all_ranks
from megazero.deepspeed.groups import ParameterGroups
from megazero.deepspeed.zero import mark
from megazero.mpu.meeting import Environment
from megazero.own.called_units import RecordedForward, called_units, recorded_forward, unit_modules
from megazero.own.engine_state import StepResult
from megazero.own.hooked_engine import HookedEngine
from megazero.own.opening import Opening, made_with
from megazero.own.units.refusals import require_alike, require_json
from megazero.system.unfinished import replaced_when_whole

LATEST = "latest"
"""The file beside checkpoints that has the name of the newest one, as DeepSpeed writes it."""


class DeepSpeedEngine(nn.Module):
    """A module in training, called as DeepSpeed's engine is.

    module        the program's own. Its parameters become those of the engine in the first forward: then it is known
                  in which order the module calls its parts
    global_steps  number of steps that were made, those before a load included
    optimizer     whose groups of parameters have the learning rates and other options
    lr_scheduler  which `step` calls behind each step; None: the program sets the rate
    """

    def __init__(
        self,
        module: nn.Module,
        opening: Opening,
        sizes: tuple[int, int],
        groups: ParameterGroups,
        lr_scheduler: LRScheduler | None,
        says_every: int | None,
    ) -> None:
        """sizes: samples of a micro-batch, and micro-batches of a step on a rank."""
        super().__init__()
        self.module, self.lr_scheduler, self.optimizer = module, lr_scheduler, groups.optimizer
        self._opening, self._sizes, self._groups, self._says_every = opening, sizes, groups, says_every
        self._engine: HookedEngine | None = None
        self._begins_with: tuple[FoundCheckpoint, bool] | None = None
        """A checkpoint, and whether the engine takes its weights alone."""
        self._result: StepResult | None = None

    # --- a step ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the module returns. In training mode and with gradients it is a micro-batch."""
        if self._engine is None:
            self._engine = self._made(args, named)
        return self._engine.forward(*args, **named)

    def backward(self, loss: Tensor) -> Tensor:
        """The gradients of a micro-batch's loss, which is a mean over its samples. Returns the loss."""
        self._needed("backward").backward(loss)
        return loss

    def step(self) -> None:
        """Update the parameters behind the last micro-batch of a step, and do nothing behind others."""
        engine = self._needed("step")
        engine.lr, engine.groups = self._groups.lrs[0], self._groups.for_update()
        result = engine.step()
        if result is None:
            return
        self._result = result
        self.optimizer.step()  # updates nothing: its parameters have no gradients. Schedules ask whether it was called
        if self._says_every and self.global_steps % self._says_every == 0 and self._opening.grid.rank == 0:
            norm, rates = float(result.grad_norm), ", ".join(f"{lr:g}" for lr in self._groups.lrs)
            print(f"step {self.global_steps}: loss {float(result.loss):.6g}, lr {rates}, norm {norm:.4g}")
        if self.lr_scheduler is not None and not bool(result.skipped):
            self.lr_scheduler.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have come to the module outside of a step, such as those of another module's loss. Those
        of a step are dropped by `step`.
        """
        super().zero_grad(set_to_none)
        if self._engine is not None:
            self._engine.forget_gradients()

    def parameters_whole(self) -> AbstractContextManager[dict[str, Tensor]]:
        """A context with the parameters by name, whole and up to date: in it the module can be used in any way. A
        collective of all ranks.
        """
        return self._needed("parameters_whole").parameters_whole()

    def _made(self, args: Any, named: Any) -> HookedEngine:
        parts, grid = unit_modules(self.module), self._opening.grid
        recorded = attempt_on_all_ranks(
            grid.world, grid.device, lambda: recorded_forward(self.module, parts, args, named)
        )
        # other data may call other units: all ranks have the units of rank 0
        order, outside = json.loads(broadcast_text(grid.world, grid.device, json.dumps([*recorded])) or "")
        units = called_units(self.module, parts, RecordedForward(order, outside))
        micro_batches, groups = self._sizes[1], self._groups
        groups.require_all(self.module)  # the program may have put others into the module since
        self._opening.group_of = groups.by_name(units.names)
        digest = zlib.crc32(json.dumps(sorted(self._opening.group_of.items())).encode())
        require_alike({"have other groups of parameters": digest}, grid)
        places, before = groups.places(self.module), [*self.module.parameters()]
        engine = made_with(self._opening, lambda opening: HookedEngine(self.module, micro_batches, units, opening))
        groups.hold(self.module, places)
        mark(self.module, before, engine)
        if self._begins_with is not None:
            checkpoint, weights_only = self._begins_with
            engine.load_found(checkpoint, weights_only=weights_only)
        return engine

    def _needed(self, what: str) -> HookedEngine:
        if self._engine is None:
            raise RuntimeError(
                f"{what} comes before the first forward, in which the engine learns how the module calls its parts"
            )
        return self._engine

    def destroy(self) -> None:
        """End the process groups, and remove files of what has left the device. Called by all ranks."""
        (self._opening if self._engine is None else self._engine).close()
        mark(self.module, [], None)

    # --- what programs ask -----------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        if self._engine is not None:
            return self._engine.steps
        if self._begins_with is None:
            return 0
        checkpoint, weights_only = self._begins_with
        return 0 if weights_only else int(checkpoint.progress["steps"])

    @property
    def device(self) -> torch.device:
        return self._opening.grid.device

    @property
    def global_rank(self) -> int:
        return self._opening.grid.rank

    @property
    def world_size(self) -> int:
        return self._opening.grid.world.size

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node."""
        return Environment.read().local_rank

    def train_batch_size(self) -> int:
        """Samples of a step on all ranks."""
        micro, steps = self._sizes
        return micro * steps * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch."""
        return self._sizes[0]

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step on a rank."""
        return self._sizes[1]

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of a step."""
        return self._engine is not None and self._engine.is_at_boundary

    def zero_optimization_stage(self) -> int:
        return self._opening.run.parallel.zero_stage

    def fp16_enabled(self) -> bool:
        return self._opening.run.optimizer.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._opening.run.optimizer.precision == "bf16"

    def get_lr(self) -> list[float]:
        """The learning rate of each group of parameters in the next step."""
        return self._groups.lrs

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each group of parameters in the next step."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients, before clipping; None before the first step."""
        return None if self._result is None else float(self._result.grad_norm)

    def was_step_applied(self) -> bool:
        """Whether the last step has updated: its gradients were finite."""
        return self._result is not None and not bool(self._result.skipped)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write a checkpoint of megazero's into the folder `tag` of `save_dir`, and its name into the file `latest`.

        tag           None: global_step and the number of steps
        client_state  what `load_checkpoint` returns, as JSON holds it

        A collective of all ranks.
        """
        engine = self._needed("save_checkpoint")
        name = f"global_step{engine.steps}" if tag is None else str(tag)
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        require_json("client_state", dict(client_state or {}))
        require_json("the state of lr_scheduler", schedule)
        about = {"client_state": dict(client_state or {}), "lr_scheduler": schedule, "groups": self._groups.to_save()}
        folder = Path(save_dir)
        engine.save(folder / name, about)

        def say() -> None:
            with replaced_when_whole(folder / LATEST) as part:
                part.write(name.encode())

        grid = self._opening.grid
        attempt_on_all_ranks(grid.world, grid.device, say if save_latest and grid.rank == 0 else None)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint of megazero's, of any layout. Returns its folder and what was handed to the save;
        (None, {}) if there is none. Before the first forward it is found, and read in that. One of `megazero.engine`
        has one rate, which is that of all groups of parameters.

        tag  None: the one that the file `latest` names; without this file the newest of `load_dir`, so that a folder of
             `megazero.engine` opens, too

        A collective of all ranks.
        """
        grid, above = self._opening.grid, Path(load_dir)
        # rank 0 alone has written the name, which may be on its disk alone
        name = found_by_rank_0(grid.world, grid.device, lambda: latest_tag(above)) if tag is None else str(tag)
        folder = above / name
        checkpoint = find_on_all_ranks(folder, grid)
        if checkpoint is None:
            return None, {}
        weights_only = load_module_only or not load_optimizer_states
        about = checkpoint.progress["about"]
        if self._engine is None:
            self._begins_with = checkpoint, weights_only
        else:
            self._engine.load_found(checkpoint, weights_only=weights_only)
        if not load_module_only:
            schedule = about.get("lr_scheduler")
            if load_lr_scheduler_states and self.lr_scheduler is not None and schedule is not None:
                self.lr_scheduler.load_state_dict(schedule)
            self._groups.load(about.get("groups", [{"lr": checkpoint.progress["lr"]}] * len(self._groups.lrs)))
        return str(folder), about.get("client_state", about)

    def module_state_dict(self) -> dict[str, Tensor]:
        """What `load_state_dict` of the module takes, in host memory, on every rank. A collective of all ranks."""
        return self._needed("module_state_dict").state_dict()

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Write `module_state_dict` with `torch.save`, in the dtype of computation. A collective of all ranks, of which
        rank 0 writes.
        """
        values = self.module_state_dict()

        def write() -> None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(values, Path(save_dir) / save_filename)

        grid = self._opening.grid
        attempt_on_all_ranks(grid.world, grid.device, write if grid.rank == 0 else None)
        return True


def latest_tag(folder: Path) -> str:
    """The name in the file `latest`; where there is none ".", the folder itself."""
    try:
        return (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return "."
