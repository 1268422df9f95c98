"""A language model of `transformers` as a list of units: what is in front of its layers, each layer, the rest.

The model's own `forward` stays the only one. A unit runs it with the modules of all other units replaced: those in
front of the layers make nothing, and a layer of another unit hands on what it gets. So masks, positions and whatever
else a family gives to its layers are what the model itself makes of the micro-batch, on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.model.evaluation import evaluating
from megazero.own.causal_look import (
    InPlace,
    LayerCall,
    blank_embedding,
    layer_forward,
    looked_at,
    names_taken,
    nothing,
    path_of_layers,
    replaced,
    without_cache,
)
from megazero.own.model import BatchTensors, Loss, Model
from megazero.system.generators import torch_generators_kept

INPUT, LABELS = "input_ids", "labels"
"""Tensors of a micro-batch, [b, s]. The label of a token is the token behind it: the model's own rule."""
UNITS_OWN = ("inputs_embeds", "use_cache", "logits_to_keep", "past_key_values")
"""Arguments of a model's `forward` that a micro-batch may not have."""
IGNORED = -100
"""A label that does not count."""
KEPT = 4
"""Micro-batches of which is kept what the model makes of them for its layers."""


def from_transformers(
    model: nn.Module, *, loss: Loss | None = None, layers: str | None = None, unused: bool = False
) -> Model:
    """The units of a language model of `transformers`.

    model   whose parts are an embedding of tokens, a list of layers, and what follows. Its modules become the engine's
    loss    as of `Model`, of the model's logits: for a model of any head, such as one that classifies sequences. None:
            that of a causal model, the cross-entropy of the token behind each one
    layers  the path of the list of layers, such as "model.layers". None: the list as long as its configuration says
    unused  as of `Model`

    A micro-batch has `input_ids`, [b, s], and what else the model's `forward` takes. Without `loss` it has `labels`,
    [b, s], of which -100 does not count; with it, whatever `loss` reads. Raises ValueError for a model that is not made
    so, and says what it does.
    """
    skeleton = Skeleton(model, layers, has_loss=loss is None)
    units: dict[str, nn.Module] = {"embedding": EmbeddingPart(skeleton)}
    units |= {f"layer-{number}": LayerPart(skeleton, number) for number in range(len(skeleton.layers))}
    units["head"] = CausalHeadPart(skeleton) if loss is None else HeadPart(skeleton)
    return Model(units, loss, unused=unused, named_by_unit=False)


def _same(hidden: Tensor, call: LayerCall) -> Tensor:
    return hidden


class _Reached(Exception):
    """Ends a forward at a layer. hidden: what the layer would get."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Skeleton:
    """A model that runs with some of its modules replaced.

    path           of the list of layers
    layers         the modules in it
    has_loss       whether its own loss is that of a causal model, which is looked at
    before, after  modules with parameters by path, that are called in front of the layers, and behind them
    width          numbers that a layer makes of a token
    """

    def __init__(self, model: nn.Module, layers: str | None, *, has_loss: bool) -> None:
        self.model, self.has_loss = model, has_loss
        self._taken = names_taken(model)
        _require_one_list(model, self._taken)
        self.path = path_of_layers(model) if layers is None else layers
        layer_list: Any = model
        for name in self.path.split("."):
            layer_list = getattr(layer_list, name, None)
        if not isinstance(layer_list, nn.ModuleList) or not len(layer_list):
            kind = type(layer_list).__name__
            raise ValueError(f"{self.path} of {type(model).__name__} is {kind}: a ModuleList with layers is needed")
        self.layers = list(layer_list)
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        if not isinstance(embedding, nn.Module):
            raise ValueError(f"{type(model).__name__} has no get_input_embeddings() that returns a module")
        self.embedding = embedding
        inside = {module for layer in self.layers for module in layer.modules()}
        self.outside = [module for module in model.modules() if module not in inside]
        for module in self.outside:  # what no unit has, such as the angles of rotary positions
            self._fill_buffers(module)
        looked = looked_at(model, self.layers, embedding, has_loss=has_loss)
        self.returns_tuple, self.width = looked.returns_tuple, looked.width
        self.before, self.after = looked.before, looked.after
        self._require_all()
        self._kept: dict[int, tuple[BatchTensors, list[LayerCall]]] = {}

    def _require_all(self) -> None:
        """Raise ValueError for a parameter that would be in no unit."""
        parts = (*self.before.values(), *self.layers, *self.after.values())
        called = {id(parameter) for part in parts for parameter in part.parameters()}
        left = [name for name, parameter in self.model.named_parameters() if id(parameter) not in called]
        if left:
            raise ValueError(
                f"parameter {left[0]} of {type(self.model).__name__} is in no module that the model calls in front of "
                f"the layers in {self.path} or behind them"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        """A copy of a unit runs the same model."""
        return self

    def _fill_buffers(self, module: nn.Module) -> None:
        """Bring buffers from the meta device to host memory, with values. Parameters stay where they are: a tied one
        would be two otherwise.
        """
        blank = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in blank.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if blank:
            self._make_values([module])

    def make_values(self, part: nn.Module) -> None:
        """Make the values of parameters and buffers of a part by the model's own rule."""
        self._make_values(part.modules())

    def _make_values(self, modules: Iterable[nn.Module]) -> None:
        rule: Any = getattr(self.model, "_init_weights", None)
        if rule is None:
            raise ValueError(f"{type(self.model).__name__} is on the meta device, and has no _init_weights()")
        with torch.no_grad():
            for module in modules:
                rule(module)

    # --- what a unit does ------------------------------------------------------------------------------------------

    def embedded(self, batch: BatchTensors, *, training: bool) -> Tensor:
        """What the first layer gets, [b, s, h] as a rule."""

        def stop(hidden: Tensor, call: LayerCall) -> Tensor:
            raise _Reached(hidden)

        try:
            self._run(batch, [stop, *[_same] * (len(self.layers) - 1)], {}, training)
        except _Reached as reached:
            return reached.hidden
        raise ValueError(f"{type(self.model).__name__} does not call the first of {self.path}")

    def call(self, number: int, hidden: Tensor, batch: BatchTensors, *, training: bool) -> LayerCall:
        """What a layer gets beside its hidden state. hidden: of its dtype."""
        if id(batch) not in self._kept:
            calls = list[LayerCall]()

            def note(given: Tensor, call: LayerCall) -> Tensor:
                calls.append(call)
                return given

            # the layer draws the same whether or not another layer had this done before
            with torch.no_grad(), torch_generators_kept(hidden.device):
                self._hollow(batch, hidden, [note] * len(self.layers), {*self.after.values()}, training)
            if len(calls) != len(self.layers):
                raise ValueError(
                    f"{type(self.model).__name__} calls {len(calls)} of the {len(self.layers)} layers in {self.path}"
                )
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[id(batch)] = batch, calls
        return self._kept[id(batch)][1][number]

    def logits(self, hidden: Tensor, batch: BatchTensors, *, training: bool) -> Tensor:
        """What the model makes of what the last layer has made."""
        layers = [*[_same] * (len(self.layers) - 1), lambda given, call: hidden]
        logits: Tensor = self._hollow(batch, hidden, layers, set(), training).logits
        return logits

    # --- how it runs -----------------------------------------------------------------------------------------------

    def _hollow(
        self, batch: BatchTensors, hidden: Tensor, layers: Sequence[InPlace], others: set[nn.Module], training: bool
    ) -> Any:
        """Run the model without what is in front of the layers, and without other modules. hidden: of its dtype."""
        zero = hidden.new_zeros(())
        empty = {module: nothing(module, zero) for module in {*self.before.values()} | others}
        empty[self.embedding] = blank_embedding(zero, self.embedding)
        return self._run(batch, layers, empty, training)

    def _run(
        self,
        batch: BatchTensors,
        layers: Sequence[InPlace],
        others: Mapping[nn.Module, Callable[..., Any]],
        training: bool,
    ) -> Any:
        """The model's `forward` with these in the place of its layers and of other modules. training: if not, what is
        in no unit is in evaluation mode meanwhile, too.
        """
        if INPUT not in batch:
            raise ValueError(f"the micro-batch has no {INPUT!r}: it has {', '.join(batch)}")
        if wrong := [name for name in batch if name in UNITS_OWN]:
            raise ValueError(f"the micro-batch has {wrong[0]!r}, which the units set themselves")
        # a loss of the program's own may read what no model takes
        given = {
            name: tensor for name, tensor in batch.items() if name != LABELS and (self.has_loss or name in self._taken)
        }
        places = {
            layer: layer_forward(in_place, returns_tuple=self.returns_tuple)
            for layer, in_place in zip(self.layers, layers, strict=True)
        }
        with replaced({**others, **places}), evaluating(() if training else self.outside):
            return self.model(**given, **without_cache(self.model))


def _require_one_list(model: nn.Module, taken: Collection[str]) -> None:
    """Raise ValueError for a model that has more than one list of layers, or takes no tokens."""
    by_hand, config = "wrap its parts as units of megazero.Model", getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder, whose layers all need what the encoder makes: "
            f"{by_hand}, as examples/own_translation.py does"
        )
    named = [name for name in taken if name not in ("args", "kwargs")]
    if config is not None and named and INPUT not in named:
        raise ValueError(
            f"{type(model).__name__} takes {named[0]}, and no {INPUT}: {by_hand}, as examples/own_vision.py does"
        )


class _ModelPart(nn.Module):
    """Some modules of a model, under the paths that they have there, so that tensors have the model's own names."""

    def __init__(self, skeleton: Skeleton, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._skeleton = skeleton
        for path, module in modules.items():
            *above, name = path.split(".")
            into: nn.Module = self
            for each in above:
                if each not in into._modules:
                    into.add_module(each, nn.Module())
                into = into.get_submodule(each)
            into.add_module(name, module)

    def reset_unit(self) -> None:
        """Make the values of a copy that had none, as the model does: for `own.values`."""
        self._skeleton.make_values(self)


class EmbeddingPart(_ModelPart):
    """What is in front of the layers."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(skeleton, skeleton.before)

    def outline(self, hidden: None, batch: BatchTensors, dtype: torch.dtype) -> Tensor:
        """As of `own.stage.boundaries`."""
        is_trained = any(each.requires_grad for each in self.parameters())
        shape = *batch[INPUT].shape, self._skeleton.width
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=is_trained)

    def forward(self, batch: BatchTensors) -> Tensor:
        return self._skeleton.embedded(batch, training=self.training)


class LayerPart(_ModelPart):
    """One layer, which makes a hidden state of the same shape."""

    def __init__(self, skeleton: Skeleton, number: int) -> None:
        self._number = number
        super().__init__(skeleton, {f"{skeleton.path}.{number}": skeleton.layers[number]})

    def outline(self, hidden: Tensor, batch: BatchTensors, dtype: torch.dtype) -> Tensor:
        """As of `own.stage.boundaries`."""
        is_trained = hidden.requires_grad or any(each.requires_grad for each in self.parameters())
        return hidden.detach().requires_grad_(is_trained)

    def forward(self, hidden: Tensor, batch: BatchTensors) -> Tensor:
        call = self._skeleton.call(self._number, hidden, batch, training=self.training)
        made = self._skeleton.layers[self._number](hidden, *call.args, **call.named)
        return made[0] if self._skeleton.returns_tuple else made


class HeadPart(_ModelPart):
    """What is behind the layers. It makes logits."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(skeleton, skeleton.after)

    def forward(self, hidden: Tensor, batch: BatchTensors) -> Any:
        return self._skeleton.logits(hidden, batch, training=self.training)


class CausalHeadPart(HeadPart):
    """What is behind the layers of a causal model, and its loss."""

    def forward(self, hidden: Tensor, batch: BatchTensors) -> tuple[Tensor, Tensor]:
        logits = super().forward(hidden, batch)
        if LABELS not in batch:
            raise ValueError(f"the micro-batch has no {LABELS!r}: it has {', '.join(batch)}")
        if batch[LABELS].shape != logits.shape[:-1]:
            shapes = f"{list(batch[LABELS].shape)}, and the logits are {list(logits.shape)}"
            raise ValueError(f"{LABELS!r} of the micro-batch are {shapes}: a label for each token is needed")
        labels = batch[LABELS][:, 1:].reshape(-1)
        wide = torch.promote_types(logits.dtype, torch.float32)  # as the models' own losses
        scores = logits[:, :-1].reshape(-1, logits.shape[-1]).to(wide)
        return F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()
