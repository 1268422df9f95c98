"""The units of one model chunk as they compute, and the bundles between chunks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from megazero.mpu.bundle import Bundle, BundleForm, MessageSpec, tensors_of
from megazero.mpu.parameter import Parameter, spec_of
from megazero.own.units.model import BatchTensors, OwnUnit, Unit
from megazero.own.units.taken_tensors import META, taken_dtype
from megazero.system.generators import seed_torch, torch_generators_kept
from megazero.system.notes import add_note

PLAIN = tuple, dict
"""The classes of bundles, beside tensors and named tuples."""


@dataclass(frozen=True)
class OwnBatch:
    """A micro-batch.

    draws        words that name this micro-batch among all of a run. What a unit draws at random depends on them
    loss_factor  0-dim: the gradient with which the backward of the summed loss starts
    """

    tensors: Mapping[str, Tensor]
    draws: str = ""
    loss_factor: Tensor | None = None


class CutUnitProof(Protocol):
    """Compares a unit that is cut with the whole one, once."""

    def __call__(self, unit: OwnUnit, hidden: Bundle | None, batch: BatchTensors, *, is_last: bool) -> None:
        """hidden: what the unit takes. is_last: whether it returns the losses."""


class OwnStage(nn.Module):
    """The units of one chunk.

    has_loss        whether the last of them is the model's last one
    computes_again  whether a backward computes a unit again, of which then its input is kept alone. Of the last unit
                    never: its backward comes at once
    keeps_buffers   whether a unit may change no buffer: other ranks have the same one, a unit is computed twice, or a
                    step that becomes whole on disks would not have it
    counted         0-dim float64: what the last unit has counted since somebody set it to 0
    proof           compares units that are cut among tp ranks with whole ones; None: nobody does
    proves          whether the next forward with gradients does so with each unit that it computes
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        has_loss: bool,
        computes_again: bool,
        keeps_buffers: bool,
        device: torch.device,
        proof: CutUnitProof | None = None,
    ) -> None:
        super().__init__()
        self.proof, self.proves = proof, False
        self.chunk = nn.ModuleList(units)
        self.has_loss, self.computes_again, self.keeps_buffers = has_loss, computes_again, keeps_buffers
        self.counted = torch.zeros((), dtype=torch.float64, device=device)
        self._by_words = {unit: parameters_by_words(unit.module) for unit in units}

    def units(self) -> list[nn.Module]:
        """In forward order."""
        return list(self.chunk)

    def forward(self, hidden: Bundle | None, batch: OwnBatch, units: tuple[int, int] | None = None) -> Bundle:
        """What the last of these units returns; of the model's last unit the sum of the losses. units: as of
        `model.stage.Stage`.
        """
        start, stop = units or (0, len(self.chunk))
        for number in range(start, stop):
            unit = self.chunk[number]
            assert isinstance(unit, OwnUnit)
            is_last = self.has_loss and number == len(self.chunk) - 1
            if self.proves and self.proof is not None:
                self.proof(unit, hidden, batch.tensors, is_last=is_last)
            again = self.computes_again and torch.is_grad_enabled() and not is_last
            versions = versions_of(self._kept(unit, hidden if again else None, batch.tensors))
            with named(unit):
                made = self._made_again(unit, hidden, batch) if again else self._made(unit, hidden, batch)
            require_same_versions(unit, self._kept(unit, hidden if again else None, batch.tensors), versions)
            hidden = self._loss(unit, made) if is_last else as_bundle(unit, made)
        assert hidden is not None
        return hidden

    def _made_again(self, unit: OwnUnit, hidden: Bundle | None, batch: OwnBatch) -> Any:
        """What a unit returns, of which a backward computes it again. Its input is saved tensor by tensor: what a
        checkpoint takes in a tuple or a dict no hook of autograd sees, and it could not leave the device. It
        draws what it has drawn by its seed, not by torch's states.
        """

        def made(*tensors: Tensor) -> Any:
            return self._made(unit, None if form is None else form.bundle(tensors), batch)

        form, given = (None, ()) if hidden is None else (BundleForm.of(hidden), tensors_of(hidden))
        return checkpoint(made, *given, use_reentrant=False, preserve_rng_state=False)

    def _made(self, unit: OwnUnit, hidden: Bundle | None, batch: OwnBatch) -> Any:
        """What a unit returns. Its draws (dropout) are those of its name and of the micro-batch, on whichever rank it
        is, and leave no trace in torch's generators.
        """
        with torch_generators_kept(self.counted.device):
            seed_torch(zlib.crc32(f"{batch.draws} {unit.name}".encode()), self.counted.device)
            return unit(hidden, batch.tensors)

    def _kept(self, unit: OwnUnit, hidden: Bundle | None, batch: BatchTensors) -> dict[str, Tensor]:
        """By words, what a unit may not change. hidden: its input, if a backward computes the unit again."""
        named = {f"tensor {name!r} of the micro-batch": tensor for name, tensor in batch.items()}
        named |= self._by_words[unit]
        if self.keeps_buffers:
            named |= buffers_by_words(unit.module)
        inputs = () if hidden is None else tensors_of(hidden)
        return named | {f"tensor {number} of its input": tensor for number, tensor in enumerate(inputs)}

    def _loss(self, unit: OwnUnit, made: Any) -> Tensor:
        """The sum of the losses of what the last unit, or the loss, has returned. Its number is counted."""
        total, number = loss_of(unit, made)
        self.counted += number
        return total


@contextmanager
def named(unit: Unit) -> Iterator[None]:
    """A context whose errors say in which unit they are."""
    try:
        yield
    except Exception as error:
        add_note(error, f"in unit {unit.name!r} of the model")
        raise


def parameters_by_words(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters, of which an optimizer has the numbers, so that no forward may change them."""
    return {f"its parameter {name}": parameter for name, parameter in module.named_parameters()}


def buffers_by_words(module: nn.Module) -> dict[str, Tensor]:
    """A module's buffers of now."""
    return {f"its buffer {name}": buffer for name, buffer in module.named_buffers()}


def versions_of(named: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Tensors by words, and how often each was changed in place so far."""
    return {words: (tensor, tensor._version) for words, tensor in named.items()}


def require_same_versions(unit: Unit, named: Mapping[str, Tensor], before: Mapping[str, tuple[Tensor, int]]) -> None:
    """Raise ValueError if a unit has changed what other ranks, a second forward of it, or an optimizer have as it was.

    before: these tensors with their versions in front of its forward.
    """
    for words, tensor in named.items():
        same, version = before.get(words, (None, 0))
        if tensor is not same or tensor._version != version:
            raise ValueError(
                f"unit {unit.name!r} changes {words}{' in place' * (tensor is same)}: other ranks, an optimizer, steps "
                "on disks, and a forward that is made again with recompute_granularity have it as it was. A batch norm "
                "keeps its statistics in evaluation mode"
            )


def loss_of(unit: OwnUnit, made: Any) -> tuple[Tensor, Tensor | float]:
    """(sum, number) of what the model returns. Raises ValueError with the unit's name for anything else."""
    named = f"the loss behind unit {unit.name!r}" if unit.has_loss else f"unit {unit.name!r}"
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{named} returns {_words(made)}: the sum of the losses and their number are needed")
    total, number = made
    if not isinstance(total, Tensor) or total.dim() or not total.is_floating_point():
        raise ValueError(f"{named} returns {_words(total)} as the sum of the losses: a 0-dim tensor is needed")
    if isinstance(number, Tensor) and number.numel() == 1:
        return total, number.detach().reshape(()).to(torch.float64)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{named} returns {_words(number)} as the number of the losses: a number is needed")
    return total, number


def as_bundle(unit: OwnUnit, made: Any) -> Bundle:
    """What a unit hands to the next. Raises ValueError with the unit's name for what is no bundle."""
    values = made.items() if isinstance(made, dict) else enumerate(made if isinstance(made, tuple) else [made])
    for name, value in values:
        if not isinstance(value, Tensor):
            where = "" if not isinstance(made, tuple | dict) else f" with {_words(value)} at {name!r}"
            what = type(made).__name__ if where else _words(made)
            needed = "a tensor, or a tuple or dict of tensors is needed"
            raise ValueError(f"unit {unit.name!r} returns {what}{where}: {needed}")
    if type(made) not in PLAIN and isinstance(made, tuple | dict) and not hasattr(made, "_make"):
        raise ValueError(
            f"unit {unit.name!r} returns {_words(made)}: another stage would get a plain one. A tuple, a named "
            "tuple or a dict is needed"
        )
    if isinstance(made, tuple | dict) and not made:
        raise ValueError(f"unit {unit.name!r} returns an empty {type(made).__name__}: nothing reaches the next unit")
    bundle: Bundle = made
    return bundle


def _words(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


def boundaries(
    units: Sequence[OwnUnit],
    chunks: Sequence[range],
    batch: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[MessageSpec, ...]:
    """The messages between model chunks of a step, found on torch's meta device, where nothing is computed.

    batch   one whose tensors have the shapes of all micro-batches
    dtype   of parameters and buffers of floats; None: each has its own
    shapes  of the model's parameters by name, which may be more than what a tp rank has of them

    Raises ValueError with the name of a unit that cannot run there.
    """
    ends, messages = {chunk.stop for chunk in chunks[:-1]}, list[MessageSpec]()
    hidden: Bundle | None = None
    seen = {name: tensor.to(META) for name, tensor in batch.items()}
    for number, unit in enumerate(units[: chunks[-1].start]):
        hidden = _outlined(unit, hidden, seen, dtype, shapes)
        if number + 1 in ends:
            messages.append(MessageSpec.of(hidden))
    return tuple(messages)


def _outlined(
    unit: OwnUnit,
    hidden: Bundle | None,
    batch: BatchTensors,
    dtype: torch.dtype | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> Bundle:
    """What a unit returns, on the meta device. A module with a method `outline` says it by that method."""
    if (outline := getattr(unit.module, "outline", None)) is not None:
        return as_bundle(unit, outline(hidden, batch, dtype))
    try:
        # an evaluation's messages are those of a step, which come from here, too
        with unit.without_trace(), torch.enable_grad():
            return as_bundle(
                unit, functional_call(unit, _on_meta(unit, dtype, shapes), (hidden, batch), tie_weights=False)
            )
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"unit {unit.name!r} cannot run on torch's meta device, which says what it sends to the next stage: "
            f"{str(error).splitlines()[0]}. Its parameters, buffers and input are on this device, and no tensor that "
            "it keeps elsewhere, such as in a list of its own"
        ) from error


def _on_meta(unit: OwnUnit, dtype: torch.dtype | None, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Parameters and buffers of a unit by place, without values."""

    def alike(name: str, tensor: Tensor) -> Tensor:
        shape = shapes[spec_of(tensor).name] if isinstance(tensor, Parameter) else tensor.shape
        wanted = taken_dtype(tensor, dtype)
        return torch.empty(shape, dtype=wanted, device=META, requires_grad=tensor.requires_grad)

    return by_places(unit, alike)


def by_places(unit: Unit, made: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """What `made` makes of the name and the tensor of each parameter and buffer of a unit, for `functional_call`: one
    name of each place. It would leave what it gets in a module that has two names.
    """
    once = {id(tensor): made(name, tensor) for name, tensor in (*unit.named_parameters(), *unit.named_buffers())}
    return {
        f"{path}.{name}" if path else name: once[id(tensor)]
        for path, module in unit.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def shapes_of(batch: Mapping[str, Tensor]) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """What of a micro-batch the messages depend on."""
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(batch.items()))
