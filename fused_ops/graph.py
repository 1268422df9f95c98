"""Autograd functions without autograd."""

from __future__ import annotations

from typing import Any

import torch


class _Nothing:
    """What a forward is told to keep, where no backward will follow."""

    needs_input_grad = (False,) * 64

    def save_for_backward(self, *tensors: Any) -> None:
        """They are not kept."""

    def set_materialize_grads(self, value: bool) -> None:
        """There will be none."""


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply(*arguments). Where no gradient is recorded its forward alone: what `apply` does around it takes
    longer than computing one token does in a small layer.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Nothing(), *arguments)
