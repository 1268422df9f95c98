"""What an engine refuses: of its ranks that they differ, of a program what it hands over, and parameters that
training does not reach.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megazero.config.source import ConfigError
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import Parameter, spec_of
from megazero.own.units.model import BatchTensors, Unit
from megazero.own.units.stage import OwnBatch, shapes_of

GivenBatches = Sequence[BatchTensors] | BatchTensors
"""Micro-batches, or one."""


def learning_rate(lr: float) -> float:
    """A learning rate. Raises ValueError for what is none."""
    if isinstance(lr, bool) or not isinstance(lr, Real) or not 0 <= lr < math.inf:
        raise ValueError(f"lr is {lr!r}: a number from 0 on is needed")
    return float(lr)


def require_json(words: str, value: Any) -> None:
    """Raise TypeError if JSON does not hold a value. words: what it is."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{words} holds what JSON does not hold: {error}") from error


def micro_batches(batches: GivenBatches, device: torch.device) -> list[OwnBatch]:
    """The micro-batches that a program hands over, on a device. Raises ValueError with the number of a wrong one."""
    given: Sequence[Any] = list(batches) if isinstance(batches, list | tuple) else [batches]
    if not given:
        raise ValueError("batches is empty: a step has one micro-batch at least")
    for number, batch in enumerate(given):
        if not isinstance(batch, Mapping):
            kind = type(batch).__name__
            raise ValueError(
                f"micro-batch {number} is {kind}: a mapping from names to tensors is needed, such as {{'x': x}}"
            )
        wrong = [name for name, tensor in batch.items() if not isinstance(tensor, Tensor)]
        if wrong:
            raise ValueError(f"micro-batch {number} has {wrong[0]!r}, which is no tensor")
        if shapes_of(batch) != shapes_of(given[0]):
            raise ValueError(f"micro-batch {number} has other names, shapes or dtypes than the first of the step")
    return [OwnBatch({name: tensor.to(device) for name, tensor in batch.items()}) for batch in given]


def require_alike(digests: Mapping[str, int], grid: ProcessGrid) -> None:
    """Raise ConfigError on all ranks if ranks have other digests.

    digests: by the words that say what ranks do where they differ. A collective of all ranks: one all-reduce.
    """
    both = [signed for digest in digests.values() for signed in (digest, -digest)]
    most = torch.tensor(both, dtype=torch.float64, device=grid.device)
    collectives.all_reduce(most, grid.world, "max").wait()
    for words, apart in zip(digests, most.view(-1, 2).sum(1).tolist(), strict=True):
        if apart:
            raise ConfigError([f"the ranks {words}"])


def require_same_batches(batches: Sequence[OwnBatch], grid: ProcessGrid, lr: float, *, contents: bool) -> None:
    """Raise ConfigError on all ranks if some have other numbers of micro-batches or another learning rate, or stages of
    a pipeline or tp ranks other shapes. Otherwise ranks would wait for each other, take messages of other lengths, or
    have other weights.

    contents: whether these compare also what is in the micro-batches, which are all read for that.

    A collective of all ranks, for which the host waits: without it no rank knows what another one has been given.
    """
    digest = zlib.crc32(repr(shapes_of(batches[0].tensors)).encode())
    inside = _contents_digest(batches) if contents and grid.pp.size * grid.tp.size > 1 else 0
    of_stages = torch.tensor([digest, -digest, inside, -inside], dtype=torch.float64, device=grid.device)
    for group in (grid.pp, grid.tp):  # behind both each rank has what all ranks of its part of a batch have
        collectives.all_reduce(of_stages, group, "max").wait()
    same = of_stages.new_tensor([len(batches), -len(batches), lr, -lr])
    both = torch.cat([same, of_stages.view(2, 2).sum(1)])
    collectives.all_reduce(both, grid.world, "max").wait()
    most, least, most_lr, least_lr, apart, inside_apart = both.tolist()
    if most != -least:
        raise ConfigError([f"the ranks take other numbers of micro-batches in a step: from {-least:.0f} to {most:.0f}"])
    if most_lr != -least_lr:
        raise ConfigError([f"the ranks have other learning rates in a step: from {-least_lr:g} to {most_lr:g}"])
    who = "the stages of a pipeline" if grid.tp.size == 1 else "tp ranks, or the stages of a pipeline,"
    if apart:
        raise ConfigError([f"{who} take micro-batches of other names, shapes or dtypes"])
    if inside_apart:
        raise ConfigError(
            [
                f"{who} take other micro-batches: those of a part have the micro-batches of that part, by "
                "engine.data_rank, and not by the number of the rank"
            ]
        )


def tensor_digest(tensor: Tensor, so_far: int) -> int:
    """What is equal for tensors with the same bytes, which are all read. so_far: the digest of those before."""
    numbers = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(numbers.data, so_far)


def _contents_digest(batches: Sequence[OwnBatch]) -> int:
    digest = 0
    for batch in batches:
        for _, tensor in sorted(batch.tensors.items()):
            digest = tensor_digest(tensor, digest)
    return digest


class TrainedParameters:
    """Which parameters of a rank's units are trained, and which of these no gradient has reached yet.

    unused   whether a parameter may go without a gradient
    masters  whether an optimizer has other numbers than the parameters, of which these are copies
    """

    def __init__(self, units: Iterable[Unit], *, unused: bool, masters: bool) -> None:
        self._units, self._masters = list(units), masters
        every = (each for unit in self._units for each in unit.module.parameters() if isinstance(each, Parameter))
        named = {spec_of(each).name: each for each in every}
        self._is_trained = {name: each.requires_grad for name, each in named.items()}
        self._named = named
        self._memory = {name: parameter.untyped_storage() for name, parameter in named.items()}
        self.accept()
        self._unreached = set() if unused else {name for name, is_trained in self._is_trained.items() if is_trained}
        for name in self._unreached:
            named[name].register_post_accumulate_grad_hook(_GradientSeen(self._unreached, name))

    def accept(self) -> None:
        """Take the parameters as they are now for those that the optimizer knows."""
        self._versions = {name: parameter._version for name, parameter in self._named.items()}

    def require_as_before(self) -> None:
        """Raise ValueError if somebody has begun or ceased to train a parameter, has put another one in its place, or
        has changed one of which an optimizer has other numbers.
        """
        now = {id(each) for unit in self._units for each in unit.module.parameters()}
        for name, parameter in self._named.items():
            if id(parameter) not in now or parameter.untyped_storage().data_ptr() != self._memory[name].data_ptr():
                raise ValueError(
                    f"parameter {name} has been replaced since the engine was made, which trains the one from then: "
                    "set values in front of the engine, or by its load"
                )
            if self._masters and parameter._version != self._versions[name]:
                raise ValueError(
                    f"parameter {name} has been changed outside of a step. The optimizer has numbers of its own, of "
                    "which it is a copy: set values in front of the engine, or by its load"
                )
            if parameter.requires_grad != self._is_trained[name]:
                raise ValueError(
                    f"requires_grad of {name} is {parameter.requires_grad} now: an engine keeps memory for what is "
                    "trained when it is made"
                )

    def require_reached(self) -> None:
        """Raise ValueError behind the first step if a trained parameter had no gradient in it."""
        for unit in self._units if self._unreached else ():
            for own, parameter in unit.module.named_parameters():
                if isinstance(parameter, Parameter) and spec_of(parameter).name in self._unreached:
                    raise ValueError(
                        f"no gradient reaches parameter {own} of unit {unit.name!r}: the loss does not depend on it. "
                        "Freeze it (requires_grad_(False)), or say unused=True of the model"
                    )


class _GradientSeen:
    """A hook of a parameter, which is told once of its gradient."""

    def __init__(self, unreached: set[str], name: str) -> None:
        self._unreached, self._name = unreached, name

    def __call__(self, parameter: Tensor) -> None:
        self._unreached.discard(self._name)
