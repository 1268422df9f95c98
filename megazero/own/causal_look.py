"""What a causal language model of `transformers` does between its modules, found by passes in which no parameter is
used: which modules come in front of the layers and which behind them, and whether layers alone hand on hidden states.

A unit runs the model's own `forward` with all other units' modules replaced (`own.causal_lm`). That is the same program
only if a layer gets exactly what the layer before returned, if what else it gets depends on the micro-batch alone, and
if a parameter is used by its own module. A model of which that is not so is refused: its numbers would be wrong.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megazero.system.generators import torch_generators_kept

TRIED = (2, 3)
"""Samples and tokens of the passes. The sizes differ: no axis is taken for another."""
FORWARDED = frozenset({"T", "H", "mT", "mH", "data", "real", "imag"})
"""Attributes of a tensor that have its values."""
CAUSAL = "ForCausalLM"
"""The kind of loss that `transformers` has for the token behind each one."""
ASKED = frozenset(
    {"size", "dim", "numel", "stride", "element_size", "is_floating_point", "get_device", "is_contiguous"}
)
"""Methods of a tensor that do not read its values. So are all other attributes."""


class LayerCall:
    """The arguments of a layer. hidden: the one that it makes another of."""

    def __init__(self, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.args, self.named = tuple(args), dict(named)
        if self.args:
            self.hidden, self.args = self.args[0], self.args[1:]
        else:
            self.hidden = self.named.pop("hidden_states")


InPlace = Callable[[Tensor, LayerCall], Tensor]
"""What stands in the place of a layer."""


@dataclass(frozen=True)
class LookedAt:
    """What was found. returns_tuple: whether a layer returns its hidden state in a tuple. For the others see
    `own.causal_lm.Skeleton`.
    """

    returns_tuple: bool
    before: dict[str, nn.Module]
    after: dict[str, nn.Module]
    width: int


def looked_at(
    model: nn.Module, layers: Sequence[nn.Module], embedding: nn.Module, *, has_loss: bool = True
) -> LookedAt:
    """Look at a model. has_loss: whether its own loss has to be that of the units.

    Raises ValueError with what it does that units cannot do.
    """
    try:
        return _look(model, layers, embedding, has_loss)
    except _Different as error:
        raise ValueError(f"{type(model).__name__} cannot be cut into units: {error}") from error


def _look(model: nn.Module, layers: Sequence[nn.Module], embedding: nn.Module, has_loss: bool) -> LookedAt:
    for name, module in model.named_modules():
        if (share := getattr(module, "layerdrop", 0.0)) and share > 0:
            raise _Different(f"{name or 'it'} leaves out layers at random (layerdrop {share})")
    why = dict[str, Exception]()
    for returns_tuple in (False, True):
        try:
            with torch.no_grad(), torch_generators_kept(device_of(embedding)):
                passes = [_Pass(model, layers, embedding, returns_tuple, variant) for variant in (0, 1)]
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
            why["a tuple" if returns_tuple else "a tensor"] = error
        else:
            if not has_loss:
                return _compared(model, passes, embedding, returns_tuple)
            if passes[0].logits.shape[:2] != TRIED:
                raise _Different(f"its logits of {list(TRIED)} tokens are {list(passes[0].logits.shape)}: say loss=")
            if passes[0].logits.shape[-1] == getattr(model.config, "vocab_size", None):
                again = partial(_Pass, model, layers, embedding, returns_tuple, 0, labels=True)
                _require_next_tokens(model, device_of(embedding), again)
            elif (kind := getattr(model, "loss_type", None)) not in (None, CAUSAL):
                raise _Different(f"its loss is of the kind {kind}, and that of units is {CAUSAL}: say loss=")
            return _compared(model, passes, embedding, returns_tuple)
    reasons = "; ".join(f"as {form}: {str(error).splitlines()[0]}" for form, error in why.items())
    raise ValueError(
        f"the layers of {type(model).__name__} do not make one hidden state of another ({reasons})"
    ) from why["a tensor"]


class _Different(Exception):
    """Something that a model does, and that units cannot do."""


class _Pass:
    """A pass in which modules with parameters hand on what they get, and layers make known numbers.

    variant  of two passes: what is in front of the layers, and what all layers but the last make, is different
    called   modules with parameters in the order of their calls, None for a layer
    labels   whether the model gets a label for each token: `self.labels`
    calls    the arguments of each layer
    logits   of the pass
    loss     the model's own, if it makes one
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        embedding: nn.Module,
        returns_tuple: bool,
        variant: int,
        *,
        labels: bool = False,
    ) -> None:
        self.called, self.calls = list[nn.Module | None](), list[LayerCall]()
        self._made: tuple[Tensor, int] | None = None
        torch.manual_seed(7)  # dropout is no difference
        table, device = next(embedding.parameters()), device_of(embedding)
        blank = torch.full((), 0.5 + variant, dtype=table.dtype, device=device)
        self._layers = len(layers)
        around = {module for module in model.modules() if layers[0] in module.modules()}
        inside = {module for layer in layers for module in layer.modules()}
        places = {
            module: self._noting(module, nothing(module, blank), 1.0 + variant)
            for module in set(model.modules()) - around - inside
            if any(True for _ in module.parameters(recurse=False))
        }
        places[embedding] = self._noting(embedding, blank_embedding(blank, embedding), 1.0)
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            places[layer] = layer_forward(self._layer(0 if is_last else 1 + variant), returns_tuple=returns_tuple)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        tokens = torch.arange(TRIED[0] * TRIED[1], device=device).view(TRIED) % table.shape[0]
        self.labels = tokens % 2
        with replaced(places), _ParametersSeen(names):
            output = model(input_ids=tokens, **without_cache(model), **({"labels": self.labels} if labels else {}))
        if getattr(output, "logits", None) is None:
            raise _Different("it returns no logits: it has no head")
        self.logits: Tensor = output.logits
        self.loss: Tensor | None = getattr(output, "loss", None)
        if self.called.count(None) != len(layers):
            raise ValueError(f"{self.called.count(None)} of {len(layers)} layers are called")

    def _noting(self, module: nn.Module, made: Callable[..., Any], scale: float) -> Callable[..., Any]:
        """What stands in the place of a module. scale: of what it makes in front of the last layer, where nothing but
        layers may have an influence.
        """

        def forward(*args: Any, **named: Any) -> Any:
            self.called.append(module)
            is_behind = self.called.count(None) == self._layers
            return made(*args, **named) if is_behind else made(*args, **named) * scale

        return forward

    def _layer(self, draw: int) -> InPlace:
        def layer(hidden: Tensor, call: LayerCall) -> Tensor:
            if self._made is not None:
                before, version = self._made
                if hidden.shape != before.shape:
                    raise ValueError(f"of {list(before.shape)} a layer makes {list(hidden.shape)}")
                if hidden is not before or hidden._version != version:
                    raise _Different("it changes the hidden state between two layers")
            self.called.append(None)
            self.calls.append(call)
            made = torch.linspace(-1.0, 1.0 + draw, hidden.numel(), dtype=hidden.dtype, device=hidden.device)
            made = made.view(hidden.shape)
            self._made = made, made._version
            return made

        return layer


def _compared(model: nn.Module, passes: Sequence[_Pass], embedding: nn.Module, returns_tuple: bool) -> LookedAt:
    """What two passes have in common. Raises _Different where a difference in front reaches what is behind."""
    first, second = passes
    for number, (one, other) in enumerate(zip(first.calls, second.calls, strict=True)):
        if not _equal((one.args, one.named), (other.args, other.named)):
            raise _Different(
                f"layer {number} gets something beside its hidden state that depends on the embedding, on what other "
                "layers make, or on a parameter"
            )
    if not _equal(first.logits, second.logits):
        raise _Different("what follows the layers reads more than what the last one makes")
    start = first.called.index(None)
    names = {module: name for name, module in model.named_modules()}
    before = {names[embedding]: embedding}
    before |= {names[module]: module for module in first.called[:start] if module is not None}
    after = {names[module]: module for module in first.called[start:] if module is not None}
    if both := sorted(before.keys() & after.keys()):
        raise _Different(f"it calls {both[0]} in front of the layers and behind them")
    return LookedAt(returns_tuple, before, after, first.calls[0].hidden.shape[-1])


def _require_next_tokens(model: nn.Module, device: torch.device, labelled: Callable[[], _Pass]) -> None:
    """Raise _Different where the model's own loss is another one than that of the units: the cross-entropy of the token
    behind each one. A model without a loss of its own gets it.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return
    try:
        with torch.no_grad(), torch_generators_kept(device):
            made = labelled()
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise _Different(f"its own loss does not take a label for each token ({reason})") from error
    if made.loss is not None:
        scores = made.logits[:, :-1].flatten(0, 1)
        tolerance = 1e-5 if scores.dtype.itemsize > 2 else 2e-2
        of_units = float(F.cross_entropy(scores.double(), made.labels[:, 1:].flatten()))
        if not math.isclose(float(made.loss), of_units, rel_tol=tolerance):
            raise _Different(
                "its own loss is not the cross-entropy of the token behind each one alone: of the same scores it is "
                f"{float(made.loss):.6g}, and that is {of_units:.6g}"
            )


def _equal(one: Any, other: Any) -> bool:
    """Whether arguments are alike: tensors by their values, other objects by their classes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return not isinstance(one, int | float | str | bool) or one == other


class _ParametersSeen(TorchFunctionMode):
    """A context in which a function of a parameter is an error: its module, which would use it, is replaced."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
        if attribute in FORWARDED if attribute else name not in ASKED:
            for each in _flat([*args, *kwargs.values()]):  # torch.cat takes them in a list
                if id(each) in self._names:
                    raise _Different(f"it uses {self._names[id(each)]} elsewhere than in a module that it calls")
        return func(*args, **kwargs)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """What is in lists and tuples in these values, too."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def names_taken(model: nn.Module) -> tuple[str, ...]:
    """The names of what a model's `forward` takes."""
    return tuple(inspect.signature(model.forward).parameters)


def without_cache(model: nn.Module) -> dict[str, bool]:
    """What has a model keep no keys and values, if it can keep some."""
    parameters = inspect.signature(model.forward).parameters
    takes = "use_cache" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {"use_cache": False} if takes else {}


def device_of(embedding: nn.Module) -> torch.device:
    """Where a model that may be on the meta device computes."""
    table = next(embedding.parameters())
    return torch.device("cpu") if table.is_meta else table.device


def layer_forward(in_place: InPlace, *, returns_tuple: bool) -> Callable[..., Any]:
    """A layer's `forward` that calls something else."""

    def forward(*args: Any, **named: Any) -> Any:
        call = LayerCall(args, named)
        made = in_place(call.hidden, call)
        return (made,) if returns_tuple else made

    return forward


def nothing(module: nn.Module, blank: Tensor) -> Callable[..., Any]:
    """What stands in the place of a module in front of the layers, or behind them: it hands on numbers, in the width of
    a linear layer, and in place of an embedding is a number. blank: 0-dim.
    """

    def forward(*args: Any, **named: Any) -> Any:
        given = next((each for each in (*args, *named.values()) if isinstance(each, Tensor)), None)
        if given is None or not given.is_floating_point() or isinstance(module, nn.Embedding):
            return blank
        if isinstance(module, nn.Linear) and module.out_features != given.shape[-1]:
            # other numbers for each feature: scores of tokens that are all alike have the same loss for any label
            return given[..., :1] * torch.linspace(1.0, 2.0, module.out_features).to(given)
        return given

    return forward


def blank_embedding(blank: Tensor, embedding: nn.Module) -> Callable[[Tensor], Tensor]:
    """What stands in the place of the embedding of tokens: the same number everywhere. blank: 0-dim."""
    width = next(embedding.parameters()).shape[-1]
    return lambda tokens: blank.expand(*tokens.shape, width).clone()  # a model may change it


def path_of_layers(model: nn.Module) -> str:
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
def replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
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
