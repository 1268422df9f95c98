"""What flows from unit to unit: which tensors that a layer gets were made by other units, and by which.

All else that a layer gets depends on the micro-batch alone, such as its masks: each rank makes that anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from megazero.mpu.bundle import Bundle, tensors_of
from megazero.own.transformers_models.nested import Place, alike, mapped, tensors_at
from megazero.own.transformers_models.stand_ins import Uncuttable, hidden_of

FRONT = -1
"""In place of a layer's number: what is in front of the layers."""
Origin = tuple[int, Place]
"""The layer that made a tensor, and its place in what that returned; of `FRONT` in what the first layer gets."""


class LayerCall:
    """The arguments of a call of a layer. given: the positional and the named ones."""

    def __init__(self, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.given = tuple(args), dict(named)

    @cached_property
    def tensors(self) -> dict[Place, Tensor]:
        """The tensors in it."""
        return tensors_at(self.given)

    @property
    def hidden(self) -> Tensor:
        """The hidden state."""
        return hidden_of(*self.given)

    @property
    def hidden_place(self) -> Place:
        """The place of the hidden state."""
        return next(place for place, tensor in self.tensors.items() if tensor is self.hidden)


class NotedCall(LayerCall):
    """The same in a look. versions: how often the tensors in it were changed in place when the layer got them."""

    def __init__(self, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        super().__init__(args, named)
        self.versions = {place: tensor._version for place, tensor in self.tensors.items()}


@dataclass(frozen=True)
class Flow:
    """What flows through the layers of a list.

    taken  of each layer, the places of what it gets from other units, and the origins of that
    made   the origin of the last layer's hidden state
    """

    taken: tuple[Mapping[Place, Origin], ...]
    made: Origin

    @cached_property
    def carried(self) -> tuple[tuple[Origin, ...], ...]:
        """Of each layer, and of what follows the last one: what units hand to it, the hidden state first."""
        wanted, found = [self.made], list[tuple[Origin, ...]]()
        for number in reversed(range(len(self.taken) + 1)):
            taken = [] if number == len(self.taken) else [*self.taken[number].values()]
            wanted = [origin for origin in dict.fromkeys([*taken, *wanted]) if origin[0] < number]
            found.append(tuple(wanted))
        return tuple(reversed(found))

    @property
    def has_more(self) -> bool:
        """Whether a layer takes more of another than its hidden state."""
        return any(len([each for each in taken.values() if each[0] != FRONT]) > 1 for taken in self.taken)

    def named(self, number: int, bundle: Bundle) -> dict[Origin, Tensor]:
        """The tensors of a bundle in front of a layer, or behind the last one, by their origins."""
        return dict(zip(self.carried[number], tensors_of(bundle), strict=True))

    def bundle(self, number: int, tensors: Mapping[Origin, Tensor]) -> Bundle:
        """The bundle in front of a layer, or behind the last one."""
        for origin in self.carried[number]:
            if origin not in tensors:
                raise ValueError(f"it returns no tensor at {list(origin[1])}, which other units need")
        made = tuple(tensors[origin] for origin in self.carried[number])
        return made[0] if len(made) == 1 else made


def returned(number: int, made: Any) -> dict[Origin, Tensor]:
    """The tensors in what a layer has returned, by their origins."""
    return {(number, place): tensor for place, tensor in tensors_at(made).items()}


def flow_of(calls: Sequence[NotedCall], others: Sequence[NotedCall], made: Sequence[Any]) -> Flow:
    """How tensors flow through the layers of a list.

    calls   of each layer, in a pass of the model
    others  the same in a pass in which all other modules made other numbers
    made    what each layer returned in the first pass

    Raises Uncuttable for a layer that gets something which depends on other numbers, and which no layer has returned.
    """
    origins, versions, taken = dict[int, Origin](), dict[int, int](), list[dict[Place, Origin]]()
    for number, (call, other) in enumerate(zip(calls, others, strict=True)):
        live = _live(number, call, other)
        if number == 0:
            origins |= {id(call.tensors[place]): (FRONT, place) for place in reversed(live)}
            versions |= {id(call.tensors[place]): call.versions[place] for place in live}
        for place in live:
            tensor = call.tensors[place]
            if id(tensor) not in origins or versions[id(tensor)] != call.versions[place]:
                raise Uncuttable(_not_followed(number, is_hidden=place == call.hidden_place))
        taken.append({place: origins[id(call.tensors[place])] for place in live})
        for origin, tensor in returned(number, made[number]).items():
            if id(tensor) not in origins:
                origins[id(tensor)], versions[id(tensor)] = origin, 0
    last = returned(len(calls) - 1, made[-1])
    return Flow(tuple(taken), next(iter(last)))


def _not_followed(number: int, *, is_hidden: bool) -> str:
    if is_hidden and number:
        return "it changes the hidden state between two layers"
    return (
        f"layer {number} gets something beside its hidden state that depends on the embedding, on what other layers "
        "make, or on a parameter, and that no layer has returned"
    )


def _live(number: int, call: LayerCall, other: LayerCall) -> list[Place]:
    """The places of tensors that are others in another pass, that of the hidden state first."""

    def blank(place: Place, tensor: Tensor) -> None:
        return None

    if not alike(mapped(call.given, blank), mapped(other.given, blank)) or call.tensors.keys() != other.tensors.keys():
        raise Uncuttable(_not_followed(number, is_hidden=False))
    live = [
        place
        for place, tensor in call.tensors.items()
        if tensor.requires_grad or not alike(tensor, other.tensors[place])
    ]
    return sorted(live, key=lambda place: place != call.hidden_place)
