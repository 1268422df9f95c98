"""Units are held to the model: with known numbers in the places of modules, both have to make the same logits, and the
same gradients reach the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.mpu.bundle import Bundle, tensors_of
from megazero.own.transformers_models.layer_lists import device_of
from megazero.own.transformers_models.look import KnownPass, looking
from megazero.own.transformers_models.parts import HeadPart, LayerPart
from megazero.own.transformers_models.skeleton import Skeleton
from megazero.own.transformers_models.stand_ins import CannotRun, Uncuttable, first_line, replaced
from megazero.system.generators import torch_generators_kept


def require_agreement(
    skeleton: Skeleton, parts: Mapping[str, nn.Module], batch: Mapping[str, Tensor], first: KnownPass
) -> None:
    """Raise Uncuttable if units make something else of a micro-batch than the model has made of it."""
    forwards: dict[nn.Module, Callable[..., Any]] = {**first.known}
    hidden: Any = None
    with torch_generators_kept(device_of(skeleton.model)), looking(skeleton.model), replaced(forwards):
        for name, part in parts.items():
            try:
                hidden = _made(part, hidden, batch)
            except CannotRun as error:
                raise Uncuttable(f"its unit {name} cannot run without the others: {first_line(error)}") from error
            if not all(map(_close, tensors_of(hidden), _expected(skeleton, part, first))):
                raise Uncuttable(_different(skeleton, part))
    _require_gradients(first, hidden)


def _made(part: nn.Module, hidden: Any, batch: Mapping[str, Tensor]) -> Bundle:
    if isinstance(part, HeadPart):
        made: Bundle = HeadPart.forward(part, hidden, batch)  # of a labelled one the logits, too
    elif hidden is None:
        made = part(batch)
    else:
        made = part(hidden, batch)
    return made


def _expected(skeleton: Skeleton, part: Any, first: KnownPass) -> tuple[Tensor, ...]:
    """What the model has made in place of a unit."""
    if isinstance(part, HeadPart):
        return (first.logits,)
    at, number = part._at, part._number + 1 if isinstance(part, LayerPart) else 0
    flow = skeleton.flows[at]
    found = list[Tensor]()
    for layer, place in flow.carried[number]:
        call = first.calls[at][0]
        found.append(call.tensors[place] if layer < 0 else _tensor(first.made[at][layer], place))
    return tuple(found)


def _tensor(tree: Any, place: Any) -> Tensor:
    for each in place:
        tree = tree[each]
    tensor: Tensor = tree
    return tensor


def _different(skeleton: Skeleton, part: Any) -> str:
    """What a unit does that the model does not."""
    if isinstance(part, LayerPart):
        each = skeleton.lists[part._at]
        return f"layer {part._number} in {each.path} gets something that depends on what other units make"
    at = len(skeleton.lists) if isinstance(part, HeadPart) else part._at
    if at == 0:
        return "what is in front of the layers is another thing without them"
    of = "the layers" if len(skeleton.lists) == 1 else f"the layers in {skeleton.lists[at - 1].path}"
    return f"what follows {of} reads more than what the last one makes"


def _require_gradients(first: KnownPass, logits: Tensor) -> None:
    """Raise Uncuttable if another gradient reaches a module through units than through the model."""
    gains = [known.gain for known in first.known.values()]
    found = list[Sequence[Tensor | None]]()
    for scores in (first.logits, logits):
        weights = torch.cos(torch.arange(scores.numel(), dtype=scores.dtype, device=scores.device)).view(scores.shape)
        total = (scores * weights).sum()
        reached: Sequence[Tensor | None] = [None] * len(gains)
        if total.requires_grad:
            reached = torch.autograd.grad(total, gains, allow_unused=True)
        found.append(reached)
    for module, whole, of_units in zip(first.known, *found, strict=True):
        zero = torch.zeros((), dtype=torch.float64)
        if not _close(zero if of_units is None else of_units, zero if whole is None else whole, logits.dtype):
            raise Uncuttable(f"another gradient reaches {first.paths[module]} in units than in the model")


def _close(one: Tensor, other: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether tensors are equal, but for rounding. dtype: in which they were computed. None: their own."""
    if one.shape != other.shape:
        return False
    tolerance = 1e-5 if (dtype or one.dtype).itemsize > 2 else 5e-2
    return torch.allclose(one.detach().double().cpu(), other.detach().double().cpu(), rtol=tolerance, atol=tolerance)
