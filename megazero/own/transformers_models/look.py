"""What a model of `transformers` does between its modules, found by passes in which no parameter is used: which modules
come in front of its layers, between encoder and decoder, and behind them, and which tensors flow from layer to layer.

Known numbers stand in the places of the modules, so that a model is looked at that no memory holds. Dropout does
nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megazero.own.transformers_models.flow import Flow, LayerCall, NotedCall, flow_of
from megazero.own.transformers_models.layer_lists import device_of, without_cache
from megazero.own.transformers_models.nested import mapped, tensors_at
from megazero.own.transformers_models.stand_ins import (
    HIDDEN,
    CannotRun,
    KnownNumbers,
    LikeHidden,
    MetaCopy,
    Shapes,
    ShapesUnknown,
    Uncuttable,
    first_line,
    replaced,
)
from megazero.system.generators import torch_generators_kept

FORWARDED = frozenset({"T", "H", "mT", "mH", "data", "real", "imag"})
"""Attributes of a tensor that have its values."""
ASKED = frozenset(
    {"size", "dim", "numel", "stride", "element_size", "is_floating_point", "get_device", "is_contiguous"}
)
"""Methods of a tensor that do not read its values. So are all other attributes."""
DROPPING = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
"""Functions of torch that set numbers to zero at random."""


@dataclass(frozen=True)
class LayerList:
    """The layers of an encoder, of a decoder, or of a model with one list. path: that of the list."""

    path: str
    layers: tuple[nn.Module, ...]


@dataclass(frozen=True)
class LookedAt:
    """What was found.

    regions  modules with parameters by path that are called in front of the first list, behind each list and in front
             of the next, and behind the last
    flows    of each list
    copies   what says the shapes that modules of the regions make
    shapes   the same of layers, of which others need the hidden state alone, or all
    first    the pass of the model that others are held to
    first_shapes  of layers in that pass
    """

    regions: tuple[dict[str, nn.Module], ...]
    flows: tuple[Flow, ...]
    copies: Mapping[nn.Module, MetaCopy]
    shapes: Mapping[nn.Module, Shapes]
    first: KnownPass
    first_shapes: Mapping[nn.Module, Shapes]


def looked_at(model: nn.Module, lists: Sequence[LayerList], batch: Mapping[str, Tensor]) -> LookedAt:
    """Look at a model. batch: what its `forward` gets.

    Raises Uncuttable with what it does that units cannot do.
    """
    _require_all_layers(model)
    paths, copies = {module: path for path, module in model.named_modules()}, dict[nn.Module, MetaCopy]()
    for module in modules_around(model, lists):
        copies[module] = MetaCopy(f"{paths[module]} ({type(module).__name__})", module)
    layers, why = {layer for each in lists for layer in each.layers}, list[str]()
    for form, shapes in _forms(paths, lists):
        try:
            passes = [KnownPass(model, lists, batch, copies, shapes, variant) for variant in (0, 1)]
        except ShapesUnknown as error:
            if error.module not in layers:
                if not why:
                    raise
                why.append(f"as {form}: {error}")
                continue
            why.append(str(error))
        except Uncuttable:
            raise
        except CannotRun as error:
            if not why:
                raise Uncuttable(f"its forward cannot run with other modules: {first_line(error)}") from error
            why.append(f"as {form}: {first_line(error)}")
        else:
            return _compared(passes, lists, copies, shapes)
    raise Uncuttable(f"its layers do not make one hidden state of another ({'; '.join(why)})")


def _require_all_layers(model: nn.Module) -> None:
    """Raise Uncuttable for a model that leaves out layers in training. Some have the share in their configuration."""
    said = {"its configuration": getattr(model, "config", None), **dict(model.named_modules())}
    for name, module in said.items():
        if (share := getattr(module, "layerdrop", 0.0)) and share > 0:
            raise Uncuttable(f"{name or 'it'} leaves out layers at random (layerdrop {share})")


def modules_around(model: nn.Module, lists: Sequence[LayerList]) -> list[nn.Module]:
    """The modules with parameters of their own that are in no layer, and in which no layer is."""
    layers = {layer for each in lists for layer in each.layers}
    inside = {module for layer in layers for module in layer.modules()}
    return [
        module
        for module in model.modules()
        if module not in inside
        and any(True for _ in module.parameters(recurse=False))
        and layers.isdisjoint(module.modules())
    ]


def _forms(paths: Mapping[nn.Module, str], lists: Sequence[LayerList]) -> Iterator[tuple[str, dict[nn.Module, Shapes]]]:
    """Ways to know what layers return: by copies, or by trying what fits."""
    layers = [layer for each in lists for layer in each.layers]
    yield "on the meta device", {layer: MetaCopy(f"{paths[layer]} ({type(layer).__name__})", layer) for layer in layers}
    yield "a tuple", dict.fromkeys(layers, LikeHidden((HIDDEN,)))
    yield "a tensor", dict.fromkeys(layers, LikeHidden(HIDDEN))


class KnownPass:
    """A pass of a model in which known numbers are in the places of its modules.

    variant    of two passes: all modules make other numbers in the other one
    called     modules that are in no layer, in the order of their calls; None for a layer
    calls      of the layers of each list
    made       what these layers returned
    forwards   what stood in the places of modules
    output     what the model returned
    paths      of all modules
    """

    def __init__(
        self,
        model: nn.Module,
        lists: Sequence[LayerList],
        batch: Mapping[str, Tensor],
        copies: Mapping[nn.Module, MetaCopy],
        shapes: Mapping[nn.Module, Shapes],
        variant: int = 0,
    ) -> None:
        self._lists = lists
        self._turns = [(at, number) for at, each in enumerate(lists) for number in range(len(each.layers))]
        self.paths = {module: path for path, module in model.named_modules()}
        self.called = list[nn.Module | None]()
        self.calls: list[list[NotedCall]] = [[] for _ in lists]
        self.made: list[list[Any]] = [[] for _ in lists]
        device = device_of(model)
        self.known = {
            module: KnownNumbers(self.paths[module], each, device, variant)
            for module, each in {**copies, **shapes}.items()
        }
        self.forwards: dict[nn.Module, Callable[..., Any]] = {
            module: self._noting(module, known) for module, known in self.known.items()
        }
        for at, each in enumerate(lists):
            for number, layer in enumerate(each.layers):
                self.forwards[layer] = self._layer(at, number, self.known[layer])
        with torch_generators_kept(device), looking(model), replaced(self.forwards):
            self.output: Any = model(**batch, **without_cache(model))
        if getattr(self.output, "logits", None) is None:
            raise Uncuttable("it returns no logits: it has no head")
        for each, calls in zip(lists, self.calls, strict=True):
            if len(calls) != len(each.layers):
                raise Uncuttable(f"{len(calls)} of {len(each.layers)} layers in {each.path} are called")

    @property
    def logits(self) -> Tensor:
        """Of the pass."""
        logits: Tensor = self.output.logits
        return logits

    def _noting(self, module: nn.Module, known: KnownNumbers) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            self.called.append(module)
            return known(*args, **named)

        return forward

    def _layer(self, at: int, number: int, known: KnownNumbers) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            turn = self.called.count(None)
            if self._turns[turn : turn + 1] != [(at, number)]:
                raise Uncuttable(f"it calls layer {number} in {self._lists[at].path} out of turn")
            self.called.append(None)
            self.calls[at].append(NotedCall(args, named))
            self.made[at].append(known(*args, **named))
            return self.made[at][-1]

        return forward


@contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """A context in which dropout does nothing, and the use of a parameter elsewhere than in its module is an error."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_ParametersSeen(names))
        yield


def _compared(
    passes: Sequence[KnownPass],
    lists: Sequence[LayerList],
    copies: Mapping[nn.Module, MetaCopy],
    shapes: Mapping[nn.Module, Shapes],
) -> LookedAt:
    """What two passes say together."""
    first, second = passes
    flows = tuple(
        flow_of(calls, others, made) for calls, others, made in zip(first.calls, second.calls, first.made, strict=True)
    )
    regions, at, number = [dict[str, nn.Module]() for _ in range(len(lists) + 1)], 0, 0
    ends = [*accumulate(len(each.layers) for each in lists)]
    for module in first.called:
        if module is None:
            number += 1
            at += number in ends
        else:
            regions[at][first.paths[module]] = module
    plain = dict(shapes)
    for at, (each, flow) in enumerate(zip(lists, flows, strict=True)):
        if not flow.has_more and _keep_shapes(first.calls[at], first.made[at]):
            plain |= {layer: _like_hidden(tree) for layer, tree in zip(each.layers, first.made[at], strict=True)}
    return LookedAt(tuple(regions), flows, copies, plain, first, shapes)


def _keep_shapes(calls: Sequence[LayerCall], made: Sequence[Any]) -> bool:
    """Whether the hidden state has one shape in all layers. It may have others in a model of pictures."""
    hidden = [next(iter(tensors_at(tree).values())) for tree in made]
    return all(call.hidden.shape == each.shape for call, each in zip(calls, hidden, strict=True))


def _like_hidden(made: Any) -> LikeHidden:
    """What says the shapes that a layer makes, if others need its hidden state alone."""
    first = next(iter(tensors_at(made)))
    return LikeHidden(mapped(made, lambda place, tensor: HIDDEN if place == first else None))


class _ParametersSeen(TorchFunctionMode):
    """A context in which a function of a parameter is an error: its module, which would use it, is replaced. Dropout
    hands on what it gets.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in DROPPING:
            return args[0] if args else kwargs["input"]
        attribute = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
        if attribute in FORWARDED if attribute else name not in ASKED:
            for each in _flat([*args, *kwargs.values()]):  # torch.cat takes them in a list
                if id(each) in self._names:
                    raise Uncuttable(f"it uses {self._names[id(each)]} elsewhere than in a module that it calls")
        return func(*args, **kwargs)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """What is in lists and tuples in these values, too."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
