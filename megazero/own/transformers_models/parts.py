"""The units of a model of `transformers`: what is in front of its layers, each layer, what is between the layers of an
encoder and those of a decoder, and what follows.

A unit takes a tensor, the hidden state, or a tuple of tensors, the hidden state first: in a decoder what the encoder
has made is another, and so is what a layer hands to later ones beside its hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megazero.mpu.bundle import Bundle
from megazero.own.transformers_models.flow import returned
from megazero.own.transformers_models.label_loss import LabelRule
from megazero.own.transformers_models.nested import filled
from megazero.own.transformers_models.skeleton import Skeleton
from megazero.own.units.model import BatchTensors


class _ModelPart(nn.Module):
    """Some modules of a model, under the paths that they have there, so that tensors have the model's own names."""

    def __init__(self, skeleton: Skeleton, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._skeleton = skeleton
        for path, module in modules.items():
            self._above(path).add_module(path.rpartition(".")[2], module)

    def _above(self, path: str) -> nn.Module:
        """What holds a module or a buffer at this path."""
        into: nn.Module = self
        for each in path.split(".")[:-1]:
            if each not in into._modules:
                into.add_module(each, nn.Module())
            into = into.get_submodule(each)
        return into

    def keep_dtypes(self, *, keeps: bool) -> None:
        """As of `own.units.model.Units`."""
        self._skeleton.has_several_dtypes = keeps

    def reset_unit(self) -> None:
        """Make the values of a copy that had none, as the model does: for `own.units.values`."""
        self._skeleton.make_values(self)


class EmbeddingPart(_ModelPart):
    """What is in front of the layers of a list. at: its number. held: modules that nothing calls, whose parameters are
    those of others.
    """

    def __init__(self, skeleton: Skeleton, at: int = 0, held: Mapping[str, nn.Module] | None = None) -> None:
        self._at = at
        super().__init__(skeleton, {**(held or {}), **skeleton.regions[at]})

    def outline(self, hidden: Bundle | None, batch: BatchTensors, dtype: torch.dtype | None) -> Bundle:
        """As of `own.units.stage.boundaries`."""
        return self._skeleton.outlined(self._at, 0, batch, dtype)

    def forward(self, batch: BatchTensors) -> Bundle:
        return self._skeleton.begun(self._at, None, batch, training=self.training)


class MiddlePart(EmbeddingPart):
    """What is between the layers of an encoder and those of a decoder."""

    def forward(self, hidden: Bundle, batch: BatchTensors) -> Bundle:  # type: ignore[override]
        return self._skeleton.begun(self._at, hidden, batch, training=self.training)


class LayerPart(_ModelPart):
    """One layer. at: the number of its list; number: its own in that."""

    def __init__(self, skeleton: Skeleton, at: int, number: int) -> None:
        self._at, self._number = at, number
        path = skeleton.lists[at].path
        super().__init__(skeleton, {f"{path}.{number}": skeleton.lists[at].layers[number]})

    def outline(self, hidden: Bundle, batch: BatchTensors, dtype: torch.dtype | None) -> Bundle:
        """As of `own.units.stage.boundaries`."""
        return self._skeleton.outlined(self._at, self._number + 1, batch, dtype)

    def forward(self, hidden: Bundle, batch: BatchTensors) -> Bundle:
        skeleton, flow = self._skeleton, self._skeleton.flows[self._at]
        call = skeleton.call(self._at, self._number, hidden, batch, training=self.training)
        tensors = flow.named(self._number, hidden)
        taken = {place: tensors[origin] for place, origin in flow.taken[self._number].items()}
        if missing := [*taken.keys() - call.tensors.keys()]:
            raise ValueError(f"it gets nothing at {missing[0]} of its arguments, where other units' tensors were found")
        args, named = filled(call.given, taken)
        made = skeleton.lists[self._at].layers[self._number](*args, **named)
        return flow.bundle(self._number + 1, {**tensors, **returned(self._number, made)})


class HeadPart(_ModelPart):
    """What is behind the layers. It makes logits. It has the buffers that are in no unit, too."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(skeleton, skeleton.regions[-1])
        self._loose = (*skeleton.loose_buffers(),)
        for path, buffer in skeleton.loose_buffers().items():
            self._above(path).register_buffer(path.rpartition(".")[2], buffer)

    def forward(self, hidden: Bundle, batch: BatchTensors) -> Any:
        for path in self._loose:  # an engine brings them to its device, and fills them from checkpoints
            above, _, name = path.rpartition(".")
            self._skeleton.model.get_submodule(above)._buffers[name] = self.get_buffer(path)
        return self._skeleton.logits(hidden, batch, training=self.training)


class LabelledHeadPart(HeadPart):
    """What is behind the layers of a model that makes words, and the loss of the labels."""

    def __init__(self, skeleton: Skeleton, rule: LabelRule) -> None:
        self._rule = rule
        super().__init__(skeleton)

    def forward(self, hidden: Bundle, batch: BatchTensors) -> tuple[Tensor, Tensor]:
        return self._rule.loss(super().forward(hidden, batch), batch)


def parts_of(skeleton: Skeleton, rule: LabelRule | None, held: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The units by name. rule: of the loss; None: the last unit makes logits. held: as of `EmbeddingPart`."""
    units: dict[str, nn.Module] = {"embedding": EmbeddingPart(skeleton, held=held)}
    kinds = ("",) if len(skeleton.lists) == 1 else ("encoder-", "decoder-")
    for at, (kind, each) in enumerate(zip(kinds, skeleton.lists, strict=True)):
        if at:
            units[f"{kind}embedding"] = MiddlePart(skeleton, at)
        units |= {f"{kind}layer-{number}": LayerPart(skeleton, at, number) for number in range(len(each.layers))}
    units["head"] = HeadPart(skeleton) if rule is None else LabelledHeadPart(skeleton, rule)
    return units
