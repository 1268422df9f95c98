"""A causal language model of `transformers` as a list of units: what is in front of its layers, each layer, the rest.

The model's own `forward` stays the only one. A unit runs it with the modules of all other units replaced: those in
front of the layers make nothing, and a layer of another unit hands on what it gets. So masks, positions and whatever
else a family gives to its layers are what the model itself makes of the micro-batch, on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.own.model import BatchTensors, Model
from megazero.own.stage import kept_generators

INPUT, LABELS = "input_ids", "labels"
"""Tensors of a micro-batch, [b, s]. The label of a token is the token behind it: the model's own rule."""
IGNORED = -100
"""A label that does not count."""
KEPT = 4
"""Micro-batches of which is kept what the model makes of them for its layers."""
TRIED = (2, 3)
"""Samples and tokens of the pass that finds what is where. The sizes differ: no axis is taken for another."""


def from_transformers(model: nn.Module, *, layers: str | None = None, unused: bool = False) -> Model:
    """The units of a causal language model of `transformers`, with its own loss: the cross-entropy of each token.

    model   whose parts are an embedding of tokens, a list of layers, and what follows. Its modules become the engine's
    layers  the path of the list of layers, such as "model.layers". None: the list as long as its configuration says
    unused  as of `Model`

    A micro-batch has `input_ids` and `labels`, [b, s] each (a label of -100 does not count), and what else the model's
    `forward` takes. Raises ValueError for a model that is not made so, and names the part.
    """
    skeleton = Skeleton(model, layers)
    units: dict[str, nn.Module] = {"embedding": EmbeddingPart(skeleton)}
    units |= {f"layer-{number}": LayerPart(skeleton, number) for number in range(len(skeleton.layers))}
    return Model(units | {"head": HeadPart(skeleton)}, unused=unused, named_by_unit=False)


class _Reached(Exception):
    """Ends a forward at a layer. hidden: what the layer would get."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Skeleton:
    """A model that runs with some of its modules replaced.

    before, after  modules with parameters by path, that are called in front of the layers, and behind them
    path           of the list of layers
    """

    def __init__(self, model: nn.Module, layers: str | None) -> None:
        self.model = model
        self.path = _path_of_layers(model) if layers is None else layers
        layer_list = _at(model, self.path)
        if not isinstance(layer_list, nn.ModuleList) or not len(layer_list):
            kind = type(layer_list).__name__
            raise ValueError(f"{self.path} of {type(model).__name__} is {kind}: a ModuleList with layers is needed")
        self.layers = list(layer_list)
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        if not isinstance(embedding, nn.Module):
            raise ValueError(f"{type(model).__name__} has no get_input_embeddings() that returns a module")
        self.embedding = embedding
        self.width = int(getattr(getattr(model, "config", None), "hidden_size", embedding_width(embedding)))
        inside = {module for layer in self.layers for module in layer.modules()}
        for module in set(model.modules()) - inside:  # what no unit has, such as the angles of rotary positions
            if any(each.is_meta for each in module.buffers(recurse=False)):
                module.to_empty(device="cpu", recurse=False)
                self.make_values(module)
        self.returns_tuple = False
        self._kept: dict[int, tuple[BatchTensors, list[LayerCall]]] = {}
        self.before, self.after = self._look()

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        """A copy of a unit runs the same model."""
        return self

    def make_values(self, part: nn.Module) -> None:
        """Make the values of parameters and buffers of a part by the model's own rule."""
        rule: Any = getattr(self.model, "_init_weights", None)
        if rule is None:
            raise ValueError(f"{type(self.model).__name__} is on the meta device, and has no _init_weights()")
        with torch.no_grad():
            for module in part.modules():
                rule(module)

    # --- what a unit does ------------------------------------------------------------------------------------------

    def embedded(self, batch: BatchTensors) -> Tensor:
        """What the first layer gets, [b, s, h] as a rule."""

        def stop(hidden: Tensor, call: LayerCall) -> Tensor:
            raise _Reached(hidden)

        try:
            self._run(batch, self.embedding(_tokens(batch)), [stop, *[_same] * (len(self.layers) - 1)], {})
        except _Reached as reached:
            return reached.hidden
        raise ValueError(f"{type(self.model).__name__} does not call the first of {self.path}")

    def call(self, number: int, hidden: Tensor, batch: BatchTensors) -> LayerCall:
        """What a layer gets beside its hidden state. hidden: of its dtype."""
        if id(batch) not in self._kept:
            calls = list[LayerCall]()

            def note(given: Tensor, call: LayerCall) -> Tensor:
                calls.append(call)
                return given

            # the layer draws the same whether or not another layer had this done before
            with torch.no_grad(), kept_generators(hidden.device):
                self._hollow(batch, hidden, [note] * len(self.layers), {*self.after.values()})
            if len(calls) != len(self.layers):
                raise ValueError(
                    f"{type(self.model).__name__} calls {len(calls)} of the {len(self.layers)} layers in {self.path}"
                )
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[id(batch)] = batch, calls
        return self._kept[id(batch)][1][number]

    def logits(self, hidden: Tensor, batch: BatchTensors) -> Tensor:
        """What the model makes of what the last layer has made."""
        layers = [*[_same] * (len(self.layers) - 1), lambda given, call: hidden]
        logits: Tensor = self._hollow(batch, hidden, layers, set()).logits
        return logits

    # --- how it runs -----------------------------------------------------------------------------------------------

    def _hollow(self, batch: BatchTensors, hidden: Tensor, layers: Sequence[_InPlace], others: set[nn.Module]) -> Any:
        """Run the model without what is in front of the layers, and without other modules. hidden: of its dtype."""
        blank = hidden.new_zeros(()).expand(*_tokens(batch).shape, hidden.shape[-1])
        return self._run(
            batch, blank, layers, {module: _nothing(module, hidden) for module in {*self.before.values()} | others}
        )

    def _run(
        self,
        batch: BatchTensors,
        embeds: Tensor,
        layers: Sequence[_InPlace],
        others: Mapping[nn.Module, Callable[..., Any]],
    ) -> Any:
        """The model's `forward` with these in the place of its layers and of other modules."""
        given = {name: tensor for name, tensor in batch.items() if name not in (INPUT, LABELS)}
        places = {layer: self._layer(in_place) for layer, in_place in zip(self.layers, layers, strict=True)}
        with _replaced({**others, **places}):
            return self.model(inputs_embeds=embeds, use_cache=False, **given)

    def _layer(self, in_place: _InPlace) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            call = LayerCall(args, named)
            made = in_place(call.hidden, call)
            return (made,) if self.returns_tuple else made

        return forward

    def _look(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """The modules in front of the layers and behind them, found in a pass in which no parameter is used."""
        for self.returns_tuple in (False, True):
            called = list[nn.Module | None]()
            try:
                shape = self._pass(called)
            except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
                shape, why = None, error
            if shape is not None and shape[:2] == TRIED and called.count(None) == len(self.layers):
                break
        else:
            raise ValueError(
                f"the layers in {self.path} of {type(self.model).__name__} do not make one hidden state of another"
            ) from why
        first = called.index(None)
        names = {module: name for name, module in self.model.named_modules()}
        before = {names[self.embedding]: self.embedding}
        before |= {names[module]: module for module in called[:first] if module is not None}
        after = {names[module]: module for module in called[first:] if module is not None}
        return before, {name: module for name, module in after.items() if name not in before}

    def _pass(self, called: list[nn.Module | None]) -> tuple[int, ...]:
        """A pass without parameters: note in `called` which modules that have some are called, None for a layer.
        Returns the shape of the logits.
        """
        blank = torch.zeros((), dtype=next(self.embedding.parameters()).dtype)

        def noting(module: nn.Module) -> Callable[..., Any]:
            nothing = _nothing(module, blank)

            def forward(*args: Any, **named: Any) -> Any:
                called.append(module)
                return nothing(*args, **named)

            return forward

        def layer(hidden: Tensor, call: LayerCall) -> Tensor:
            called.append(None)
            return hidden

        inside = {module for layer in self.layers for module in layer.modules()}
        places = {
            module: noting(module)
            for module in self.model.modules()
            if module not in inside and any(True for _ in module.parameters(recurse=False))
        }
        places |= {each: self._layer(layer) for each in self.layers}
        with torch.no_grad(), _replaced(places):
            made = self.model(inputs_embeds=blank.expand(*TRIED, self.width), use_cache=False)
        return tuple(made.logits.shape)


class LayerCall:
    """The arguments of a layer. hidden: the one that it makes another of."""

    def __init__(self, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.args, self.named = tuple(args), dict(named)
        if self.args:
            self.hidden, self.args = self.args[0], self.args[1:]
        else:
            self.hidden = self.named.pop("hidden_states")


_InPlace = Callable[[Tensor, LayerCall], Tensor]
"""What stands in the place of a layer."""


def _same(hidden: Tensor, call: LayerCall) -> Tensor:
    return hidden


def _nothing(module: nn.Module, like: Tensor) -> Callable[..., Any]:
    """What stands in the place of a module in front of the layers, or behind them: it hands on numbers, and in place of
    an embedding is a zero.
    """

    def forward(*args: Any, **named: Any) -> Any:
        given = next((each for each in (*args, *named.values()) if isinstance(each, Tensor)), None)
        numbers = given is not None and given.is_floating_point() and not isinstance(module, nn.Embedding)
        return given if numbers else like.new_zeros(())

    return forward


def embedding_width(embedding: nn.Module) -> int:
    """Numbers that an embedding makes of a token."""
    return int(next(embedding.parameters()).shape[-1])


def _tokens(batch: BatchTensors) -> Tensor:
    if INPUT not in batch:
        raise ValueError(f"the micro-batch has no {INPUT!r}: it has {', '.join(batch)}")
    return batch[INPUT]


def _at(model: nn.Module, path: str) -> Any:
    module: Any = model
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _path_of_layers(model: nn.Module) -> str:
    """The path of the one list with as many modules as the configuration has layers, in no other list."""
    number = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    lists = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    paths = [name for name, each in lists.items() if len(each) == number]
    outer = [path for path in paths if not any(path.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        has = f"it has the lists {', '.join(lists)}" if lists else "it has no list of modules"
        raise ValueError(f"{type(model).__name__} has its layers at an unknown place: say layers=; {has}")
    return outer[0]


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """A context in which modules do something else when they are called."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, forward_before in before.items():
            if forward_before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward_before


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
        shape = *_tokens(batch).shape, self._skeleton.width
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=is_trained)

    def forward(self, batch: BatchTensors) -> Tensor:
        return self._skeleton.embedded(batch)


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
        call = self._skeleton.call(self._number, hidden, batch)
        made = self._skeleton.layers[self._number](hidden, *call.args, **call.named)
        return made[0] if self._skeleton.returns_tuple else made


class HeadPart(_ModelPart):
    """What is behind the layers, and the loss."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(skeleton, skeleton.after)

    def forward(self, hidden: Tensor, batch: BatchTensors) -> tuple[Tensor, Tensor]:
        logits = self._skeleton.logits(hidden, batch)
        if LABELS not in batch:
            raise ValueError(f"the micro-batch has no {LABELS!r}: it has {', '.join(batch)}")
        labels = batch[LABELS][:, 1:].reshape(-1)
        wide = torch.promote_types(logits.dtype, torch.float32)  # as the models' own losses
        scores = logits[:, :-1].reshape(-1, logits.shape[-1]).to(wide)
        return F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()
