"""Where a graph of autograd begins in the midst of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GraphEntry:
    """The beginning of a graph: a hidden state enters the graph here, and the hidden state's gradient arrives here.

    An entry does not keep the hidden state. A leaf tensor would, until the backward; with an entry the hidden state is
    freed as soon as no unit of the graph needs it.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        """The hidden state as a tensor whose gradient is wanted."""
        # Detached: of a leaf that needs a gradient a graph holds the place where it is added up, and so the leaf.
        entered: Tensor = _Enter.apply(hidden.new_empty(0).requires_grad_(), hidden.detach(), self)
        return entered


class _Enter(torch.autograd.Function):
    """(an empty tensor that has the graph recorded, hidden, entry) -> hidden."""

    @staticmethod
    def forward(ctx: Any, recorded: Tensor, hidden: Tensor, entry: GraphEntry) -> Tensor:
        ctx.entry = entry
        return hidden.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ctx.entry.gradient,) = grads
        return None, None, None
