"""A model of `transformers` that runs for one of its units: with blanks in the places of all other units' modules.

The model's own `forward` stays the only one. So masks, positions and whatever else a family gives to its layers are
what the model itself makes of the micro-batch, on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.model.evaluation import evaluating
from megazero.mpu.bundle import Bundle, tensors_of, with_tensors
from megazero.own.transformers_models.family_rule import make_values
from megazero.own.transformers_models.flow import FRONT, LayerCall, Origin, returned
from megazero.own.transformers_models.layer_lists import (
    has_encoder_and_decoder,
    main_input,
    names_taken,
    without_cache,
)
from megazero.own.transformers_models.look import LayerList, LookedAt
from megazero.own.transformers_models.nested import mapped
from megazero.own.transformers_models.stand_ins import LikeHidden, MetaRun, blank_forward, replaced
from megazero.own.transformers_models.trial_batches import ANSWERS, LABELS, shift_of, with_labels
from megazero.own.units.model import BatchTensors
from megazero.system.generators import torch_generators_kept

UNITS_OWN = (
    "inputs_embeds",
    "decoder_inputs_embeds",
    "encoder_outputs",
    "use_cache",
    "logits_to_keep",
    "past_key_values",
)
"""Arguments of a model's `forward` that a micro-batch may not have."""
KEPT = 4
"""Micro-batches of which is kept what the model makes of them for its layers."""
InPlace = Callable[[LayerCall], Any]
"""What stands in the place of a layer."""


class _Reached(Exception):
    """Ends a forward at a layer. call: what the layer would get."""

    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.call = call


def _stop(call: LayerCall) -> Any:
    raise _Reached(call)


class Skeleton:
    """A model that runs with some of its modules replaced.

    lists     of its layers
    looked    what was found of it
    has_loss  whether the units have the loss of labels. If not, the program's own reads what it likes of a micro-batch

    has_several_dtypes
              whether parameters keep their dtypes. If not, all have that of the hidden state
    """

    def __init__(self, model: nn.Module, lists: Sequence[LayerList], looked: LookedAt, *, has_loss: bool) -> None:
        self.model, self.lists, self._has_loss = model, tuple(lists), has_loss
        self.flows, self.regions = looked.flows, looked.regions
        self._copies, self._shapes = looked.copies, looked.shapes
        self.input, self._taken, self._halves = main_input(model), names_taken(model), has_encoder_and_decoder(model)
        layers = {module for each in lists for layer in each.layers for module in layer.modules()}
        self._outside = [module for module in model.modules() if module not in layers]
        owned = {module for each in self.regions for part in each.values() for module in part.modules()}
        self._loose = [module for module in self._outside if module not in owned]
        self._kept: dict[int, tuple[BatchTensors, list[list[LayerCall]]]] = {}
        self._outlined: tuple[Any, list[list[Bundle]]] = None, []
        self.has_several_dtypes = len({each.dtype for each in model.parameters() if each.is_floating_point()}) > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        """A copy of a unit runs the same model."""
        return self

    def loose_buffers(self) -> dict[str, Tensor]:
        """Buffers by path that a checkpoint of the model has, and that are in no module of a unit."""
        paths = {module: path for path, module in self.model.named_modules()}
        return {
            f"{paths[module]}.{name}".removeprefix("."): buffer
            for module in self._loose
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    def make_values(self, part: nn.Module) -> None:
        """Make the values of parameters and buffers of a part by the model's own rule."""
        make_values(self.model, part.modules())

    # --- what a unit does ------------------------------------------------------------------------------------------

    def begun(self, at: int, before: Bundle | None, batch: BatchTensors, *, training: bool) -> Bundle:
        """What the first layer of a list gets, by the modules in front of it. before: what the list before has made;
        None for the first list.
        """
        layers = self._blank_layers(before)
        layers[at][0] = _stop
        if at:
            assert before is not None
            layers[at - 1][-1] = self._last(at - 1, before)
        call = self._reached(batch, layers, self._blanks(self._others(at), before), training)
        if call is None:
            raise ValueError(f"{type(self.model).__name__} does not call the first of {self.lists[at].path}")
        return self.flows[at].bundle(0, self._first_tensors(at, call))

    def _first_tensors(self, at: int, call: LayerCall) -> dict[Origin, Tensor]:
        """What the first layer of a list takes of other units."""
        taken = self.flows[at].taken[0]
        return {(FRONT, place): call.tensors[place] for place in taken if place in call.tensors}

    def call(self, at: int, number: int, bundle: Bundle, batch: BatchTensors, *, training: bool) -> LayerCall:
        """What a layer gets. What other units make of it is blank, and has to be replaced."""
        if id(batch) not in self._kept:
            calls = [list[LayerCall]() for _ in self.lists]
            layers = self._blank_layers(bundle)
            for noted, each in zip(calls, layers, strict=True):
                each[:] = [_noting(noted, in_place) for in_place in each]
            layers[-1][-1] = _noting(calls[-1], _stop)
            # the layer draws the same whether or not another layer had this done before
            with torch.no_grad(), torch_generators_kept(tensors_of(bundle)[0].device):
                self._reached(batch, layers, self._blanks(self._others(), bundle), training)
            for listed, noted in zip(self.lists, calls, strict=True):
                if (number_of := len(listed.layers)) != len(noted):
                    family = type(self.model).__name__
                    raise ValueError(f"{family} calls {len(noted)} of the {number_of} layers in {listed.path}")
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[id(batch)] = batch, calls
        return self._kept[id(batch)][1][at][number]

    def logits(self, bundle: Bundle, batch: BatchTensors, *, training: bool) -> Tensor:
        """What the model makes of what the last layer has made."""
        layers, last = self._blank_layers(bundle), len(self.lists) - 1
        layers[last][-1] = self._last(last, bundle)
        others = self._blanks(self._others(len(self.lists)), bundle)
        logits: Tensor = self._run(batch, layers, others, training).logits
        return logits

    def outlined(self, at: int, number: int, batch: BatchTensors, dtype: torch.dtype | None) -> Bundle:
        """The bundle in front of a layer of a list, or behind its last one, on the meta device.

        dtype: of parameters; None: each has its own.
        """
        key = dtype, tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items())
        if self._outlined[0] != key:
            self._outlined = key, self._outlines(batch, dtype)
        bundle = self._outlined[1][at][number]
        leaves = [each.detach().to("meta").requires_grad_(each.requires_grad) for each in tensors_of(bundle)]
        return with_tensors(bundle, leaves)

    # --- how it runs -----------------------------------------------------------------------------------------------

    def _outlines(self, batch: BatchTensors, dtype: torch.dtype | None) -> list[list[Bundle]]:
        """The bundles in front of each layer and behind the last one, of each list: by a pass with blanks alone."""
        device, how = torch.device("cpu"), MetaRun(dtype, graded=True)
        bundles = [list[Bundle]() for _ in self.lists]
        tensors = [dict[Origin, Tensor]() for _ in self.lists]
        blank = {name: torch.ones(each.shape, dtype=each.dtype) for name, each in batch.items()}
        shifts = self._halves and (self._has_loss or shift_of(self.model) is not None)
        if shifts and LABELS in blank and ANSWERS not in blank:
            blank[ANSWERS] = blank[LABELS]  # of the same shape: a rule that shifts may look for the end of a sentence

        def noted(at: int, number: int, layer: nn.Module) -> InPlace:
            shapes = self._shapes[layer]
            is_trained = any(each.requires_grad for each in layer.parameters())

            def in_place(call: LayerCall) -> Any:
                if number == 0:
                    tensors[at] |= self._first_tensors(at, call)
                bundles[at].append(self.flows[at].bundle(number, tensors[at]))
                if isinstance(shapes, LikeHidden):
                    hidden = call.hidden
                    made = shapes.of(hidden.detach().requires_grad_(hidden.requires_grad or is_trained))
                else:
                    args, named = call.given
                    made = blank_forward(shapes, how, device)(*args, **named)
                tensors[at] |= returned(number, made)
                if number == len(self.lists[at].layers) - 1:
                    bundles[at].append(self.flows[at].bundle(number + 1, tensors[at]))
                    if at == len(self.lists) - 1:
                        raise _Reached(call)
                return made

            return in_place

        layers = [
            [noted(at, number, layer) for number, layer in enumerate(each.layers)] for at, each in enumerate(self.lists)
        ]
        others = {module: blank_forward(self._copies[module], how, device) for module in self._others()}
        with torch.enable_grad(), torch_generators_kept(device):
            self._reached(blank, layers, others, training=True)
        return bundles

    def _others(self, own: int | None = None) -> list[nn.Module]:
        """The modules that are in no layer, and not in this region."""
        mine = set[nn.Module]() if own is None else {*self.regions[own].values()}
        return [module for each in self.regions for module in each.values() if module not in mine]

    def _blanks(self, modules: Collection[nn.Module], like: Bundle | None) -> dict[nn.Module, Callable[..., Any]]:
        """What makes zeros in the places of modules. like: a bundle of their dtype and device. None: nobody reads it"""
        hidden = torch.empty(0) if like is None else tensors_of(like)[0]
        how, copies = self._blank_run(hidden), self._copies
        return {module: blank_forward(copies[module], how, hidden.device) for module in modules}

    def _blank_run(self, hidden: Tensor) -> MetaRun:
        """How blanks run beside this hidden state."""
        return MetaRun(None if self.has_several_dtypes else hidden.dtype)

    def _blank_layers(self, like: Bundle | None) -> list[list[InPlace]]:
        """What makes zeros, or hands on the hidden state, in the places of all layers."""
        hidden = torch.empty(0) if like is None else tensors_of(like)[0]

        def blank(layer: nn.Module) -> InPlace:
            shapes = self._shapes[layer]
            if isinstance(shapes, LikeHidden):
                return lambda call: shapes.of(call.hidden)
            zeros = blank_forward(shapes, self._blank_run(hidden), hidden.device)
            return lambda call: zeros(*call.given[0], **call.given[1])

        return [[blank(layer) for layer in each.layers] for each in self.lists]

    def _last(self, at: int, bundle: Bundle) -> InPlace:
        """What returns a hidden state in the place of the last layer of a list."""
        flow, number = self.flows[at], len(self.lists[at].layers)
        hidden = flow.named(number, bundle)[flow.made]
        blank = self._blank_layers(bundle)[at][-1]
        _, made = flow.made
        return lambda call: mapped(blank(call), lambda place, tensor: hidden if place == made else tensor)

    def _reached(
        self,
        batch: BatchTensors,
        layers: Sequence[Sequence[InPlace]],
        others: Mapping[nn.Module, Callable[..., Any]],
        training: bool,
    ) -> LayerCall | None:
        """Run the model until one of its layers ends it, and return what that one gets."""
        try:
            self._run(batch, layers, others, training)
        except _Reached as reached:
            return reached.call
        return None

    def _run(
        self,
        batch: BatchTensors,
        layers: Sequence[Sequence[InPlace]],
        others: Mapping[nn.Module, Callable[..., Any]],
        training: bool,
    ) -> Any:
        """The model's `forward` with these in the place of its layers and of other modules. training: if not, what is
        in no unit is in evaluation mode meanwhile, too.
        """
        given = self._given(batch)
        device = given[self.input].device
        for module in self._loose:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        places = {
            layer: _forward_of(in_place)
            for each, in_places in zip(self.lists, layers, strict=True)
            for layer, in_place in zip(each.layers, in_places, strict=True)
        }
        with replaced({**others, **places}), evaluating(() if training else self._outside):
            return self.model(**given, **without_cache(self.model))

    def _given(self, batch: BatchTensors) -> dict[str, Tensor]:
        """What the model's `forward` gets of a micro-batch."""
        if self.input not in batch:
            raise ValueError(f"the micro-batch has no {self.input!r}: it has {', '.join(batch)}")
        if wrong := [name for name in batch if name in UNITS_OWN]:
            raise ValueError(f"the micro-batch has {wrong[0]!r}, which the units set themselves")
        # a loss of the program's own may read what no model takes
        given = {
            name: tensor for name, tensor in batch.items() if name != LABELS and (self._has_loss or name in self._taken)
        }
        if LABELS in batch:
            return with_labels(self.model, given, batch[LABELS], has_loss=self._has_loss)
        return given


def _noting(noted: list[LayerCall], in_place: InPlace) -> InPlace:
    def note(call: LayerCall) -> Any:
        noted.append(call)
        return in_place(call)

    return note


def _forward_of(in_place: InPlace) -> Callable[..., Any]:
    """A layer's `forward` that calls something else."""
    return lambda *args, **named: in_place(LayerCall(args, named))
