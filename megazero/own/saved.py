"""Checkpoints of a user's model: those of `megazero.checkpoint`, and beside their tensors a file with what is not
trained (frozen parameters and buffers). They open on any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.fence import new_token
from megazero.checkpoint.format import Damaged
from megazero.checkpoint.manager import Checkpoints, FoundCheckpoint
from megazero.config.dump import run_dict
from megazero.config.schema import CheckpointConfig, OptimizerConfig, Run
from megazero.mpu.grid import ProcessGrid, background_group
from megazero.mpu.parameter import ParameterSpec
from megazero.own.settings import SECTIONS
from megazero.own.units.parameter_shape import ParameterShape
from megazero.pipeline.stage_specs import chunks_of
from megazero.zero.layout import owned_fragments
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.state import packing_on

BESIDE = "untrained.safetensors"
"""The file with frozen parameters and buffers, by name."""
MODEL = "model"
"""What a checkpoint's progress has of the model, as `saved_model` returns it."""


def saved_model(inventory: Sequence[Sequence[ParameterShape]], names: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint says of a model, so that a program without its modules knows the names and shapes of tensors.

    inventory  the parameters of each unit
    names      by each further name that modules have for a parameter, the parameter's own
    """
    every = {each.name: each for unit in inventory for each in unit}
    return {
        "names": {name: own for name, own in names.items() if every[own].is_trained},
        "shapes": {name: list(each.shape) for name, each in every.items() if each.split and each.split.parts > 1},
        "frozen": sorted(
            {name for name, each in every.items() if not each.is_trained}
            | {name for name, own in names.items() if not every[own].is_trained}
        ),
    }


class OwnSaving:
    """The checkpoints of one folder, and what is not trained of the save that is under way or comes next.

    make: makes them with a function that writes more into the folder of a checkpoint.
    """

    def __init__(self, make: Callable[[Callable[[Path], None]], Checkpoints]) -> None:
        self._beside: dict[str, Tensor] = {}
        self.checkpoints = make(lambda folder: save_file(self._beside, folder / BESIDE))

    def hold(self, beside: Mapping[str, Tensor]) -> None:
        """Take what is not trained, for the next save. The save before is over."""
        self._beside = {name: tensor.contiguous() for name, tensor in beside.items()}


@dataclass
class OwnCheckpoints:
    """Saves and loads the state of an engine. Both are collectives of all ranks.

    inventory  the parameters of each unit
    chunks     the units of each model chunk
    """

    run: Run
    grid: ProcessGrid
    optimizer: ShardedOptimizer
    inventory: Sequence[Sequence[ParameterShape]]
    chunks: Sequence[range]

    def __post_init__(self) -> None:
        self._saving: tuple[str, OwnSaving] | None = None

    def save(self, folder: str, steps: int, progress: Mapping[str, Any], beside: Mapping[str, Tensor]) -> Path:
        """Write a checkpoint into a folder, whose older ones beyond three are deleted; return its path.

        beside: what is not trained, on rank 0.
        """
        if self._saving is None or self._saving[0] != folder:
            self._saving = folder, self.of(CheckpointConfig(save=folder))
            self._saving[1].checkpoints.claim()
        self._saving[1].hold(beside)
        return self._saving[1].checkpoints.save(steps, dict(progress)).path

    def load(self, found: FoundCheckpoint, *, weights_only: bool = False) -> None:
        """Fill the state, or its weights alone, from a checkpoint. Raises Damaged, or ValueError with all names that do
        not fit.
        """
        self.of(CheckpointConfig(load=str(found.path), no_load_optim=weights_only)).checkpoints.load(found)

    def untrained(self, found: FoundCheckpoint) -> dict[str, Tensor]:
        """What a checkpoint has that is not trained. Raises Damaged."""
        read = dict[str, Tensor]()

        def read_beside() -> None:
            try:
                read.update(load_file(found.path / BESIDE))
            except (OSError, SafetensorError) as error:
                raise Damaged(f"checkpoint {found.path} is damaged: {BESIDE}: {error}") from error

        attempt_on_all_ranks(self.grid.world, self.grid.device, read_beside)
        return read

    def of(self, cfg: CheckpointConfig) -> OwnSaving:
        """What saves and loads by a configuration. Its folder is not claimed yet. A collective of all ranks."""
        settings = {name: part for name, part in run_dict(self.run).items() if name in SECTIONS}
        token = new_token(self.grid.world, self.grid.device)
        fragments = self._fragments_of_all()
        group = background_group(self.grid) if cfg.async_save else None
        return OwnSaving(
            lambda write: Checkpoints(cfg, settings, self.optimizer, fragments, self.grid, token, group, write)
        )

    def _fragments_of_all(self) -> Callable[[], Sequence[Sequence[Any]]]:
        """A function that returns the fragments of every rank, by arithmetic without messages."""
        axes, chunks = self.grid.axes, chunks_of(self.run)
        packing = packing_on(self.grid, self.run.parallel, self.run.offload)

        def specs_of(unit: int, tp_rank: int) -> list[ParameterSpec]:
            return [each.spec(tp_rank, axes.tp) for each in self.inventory[unit] if each.is_trained]

        def held_by(rank: int) -> list[Any]:
            at = axes.coordinates(rank)
            specs = [[specs_of(unit, at.tp) for unit in self.chunks[chunk]] for chunk in chunks.of(at.pp)]
            return [fragment for _, fragment in owned_fragments(specs, axes, at, packing)]

        return lambda: [held_by(rank) for rank in range(axes.world_size)]


def require_names(read: Mapping[str, Tensor], held: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if what is not trained has other names or shapes than a checkpoint's."""
    if wrong := sorted(read.keys() ^ held.keys()):
        where = "the model does not have" if wrong[0] in read else "it does not have"
        raise ValueError(f"the checkpoint is of another model: {where} {', '.join(wrong)}")
    for name, tensor in read.items():
        if tuple(tensor.shape) != held[name]:
            raise ValueError(f"the checkpoint's {name} is {list(tensor.shape)}, and the model's {list(held[name])}")


def kept_in(found: FoundCheckpoint) -> tuple[str, ...]:
    """What a checkpoint has of each weight, by the names of its optimizer. One that does not say it is of the time when
    an engine had our own optimizers alone.
    """
    if (kept := found.progress.get("optimizer_keeps")) is not None:
        return tuple(kept)
    return OptimizerConfig(optimizer=found.run["optimizer"]["optimizer"]).moments


def require_same_optimizer(saved: Sequence[str], kept: Sequence[str]) -> None:
    """Raise ValueError if a checkpoint has something else of each weight than an optimizer keeps."""
    if tuple(saved) != tuple(kept):
        then, now = (", ".join(names) or "nothing" for names in (saved, kept))
        raise ValueError(
            f"the checkpoint is of another optimizer: it has {then} of each weight, and this optimizer keeps {now}"
        )
