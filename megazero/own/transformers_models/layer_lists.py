"""Where the layers of a model of `transformers` are, and what the model's `forward` takes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

LENGTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
"""Names of a configuration for the number of layers in a list."""


def has_encoder_and_decoder(model: nn.Module) -> bool:
    """Whether its configuration says so, and it has both. A model of which one is used alone has one list of layers."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and all(_halves(model))


def _halves(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The encoder and the decoder of a model."""
    found = []
    for name in ("get_encoder", "get_decoder"):
        half = getattr(model, name, lambda: None)()
        found.append(half if isinstance(half, nn.Module) and half is not model else None)
    return found[0], found[1]


def paths_of_layers(model: nn.Module, layers: str | Sequence[str] | None) -> tuple[str, ...]:
    """The paths of the one list of layers, or of the encoder's and the decoder's. layers: what the program says.

    Raises ValueError for a list that is not found.
    """
    if layers is not None:
        paths = (layers,) if isinstance(layers, str) else tuple(layers)
        if len(paths) not in (1, 2):
            raise ValueError(f"layers= has {len(paths)} paths: one, or that of an encoder and that of a decoder")
        return paths
    if not has_encoder_and_decoder(model):
        return (_path_in(model, model),)
    return tuple(_path_in(model, half) for half in _halves(model) if half is not None)


def _path_in(model: nn.Module, part: nn.Module) -> str:
    """The path of the one list in a part of a model with as many modules as the configuration has layers, in no other
    list.
    """
    config = getattr(model, "config", None)
    names = LENGTHS if part is not model else LENGTHS[:1]
    numbers = {getattr(config, name, None) for name in names} - {None}
    inside = set(part.modules())
    lists = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and each in inside}
    outer = {path: each for path, each in lists.items() if not any(path.startswith(f"{other}.") for other in lists)}
    found = [path for path, each in outer.items() if len(each) in numbers]
    if len(outer) == 1:
        return next(iter(outer))
    if len(found) != 1:
        has = f"it has the lists {', '.join(lists)}" if lists else "it has no list of modules"
        raise ValueError(f"{type(model).__name__} has its layers at an unknown place: say layers=; {has}")
    return found[0]


def layers_at(model: nn.Module, path: str) -> list[nn.Module]:
    """The layers in the list at this path. Raises ValueError if there is none."""
    at: Any = model
    for name in path.split("."):
        at = getattr(at, name, None)
    if not isinstance(at, nn.ModuleList) or not len(at):
        raise ValueError(f"{path} of {type(model).__name__} is {type(at).__name__}: a ModuleList with layers is needed")
    return list(at)


def main_input(model: nn.Module) -> str:
    """The name of the tensor that a model makes its hidden states of."""
    taken, name = names_taken(model), str(getattr(model, "main_input_name", "input_ids"))
    if name in taken or "args" in taken or "kwargs" in taken:
        return name
    return next((each for each in taken if each in ("pixel_values", "input_values", "input_features")), name)


def names_taken(model: nn.Module) -> tuple[str, ...]:
    """The names of what a model's `forward` takes."""
    return tuple(inspect.signature(model.forward).parameters)


def without_cache(model: nn.Module) -> dict[str, bool]:
    """What has a model of tokens keep no keys and values, if it can keep some."""
    parameters = inspect.signature(model.forward).parameters
    takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    takes = "use_cache" in parameters or (takes_more and main_input(model) == "input_ids")
    return {"use_cache": False} if takes else {}


def device_of(model: nn.Module) -> torch.device:
    """Where a model that may be on the meta device computes."""
    first = next(iter(model.parameters()), torch.empty(0))
    return torch.device("cpu") if first.is_meta else first.device
