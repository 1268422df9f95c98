"""The values with which modules of a model of `transformers` on the meta device begin: by the rule of its family."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def make_values(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Make the values of parameters and buffers of modules by the rule of their model. Raises ValueError for none."""
    rule: Any = getattr(model, "_init_weights", None)
    if rule is None:
        raise ValueError(f"{type(model).__name__} is on the meta device, and has no _init_weights()")
    with torch.no_grad():
        for module in modules:
            rule(module)


def fill_buffers(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Bring buffers that are in no layer from the meta device to host memory, with values: such as the angles of rotary
    positions, which no unit has. Parameters stay where they are: a tied one would be two otherwise.
    """
    inside = {module for layer in layers for module in layer.modules()}
    for module in model.modules():
        buffers = {} if module in inside else module._buffers
        blank = {name: buffer for name, buffer in buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in blank.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if blank:
            make_values(model, [module])
