"""Calling autograd functions without autograd's overhead where nothing is recorded."""

from __future__ import annotations

from typing import Any

import torch


class _Nothing:
    """A context for `forward` that keeps nothing, since no backward will follow."""

    needs_input_grad = (False,) * 64

    def save_for_backward(self, *tensors: Any) -> None:
        """Does nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Does nothing."""


def apply_or_forward(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply(*arguments), or only its forward where autograd does not record.

    The overhead of `apply` is larger than the time of a small layer for one token.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Nothing(), *arguments)
