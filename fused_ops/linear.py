"""The three products of a linear layer.

m rows (tokens), k inputs, n outputs; activations [..., k] and [..., n], weight [n, k]. 16-bit products are summed in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias: [..., k] -> [..., n], rounded once."""
    return F.linear(x, weight, bias)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """grad weight: [..., n] -> [..., k], contiguous and of its own storage."""
    return torch.matmul(grad, weight)


def add_weight_gradient(grad: Tensor, x: Tensor, into: Tensor, add: bool) -> None:
    """grad^T x, [m, n] and [m, k], written into (or added to) `into` [n, k], whose dtype may be wider than theirs."""
    if into.dtype != grad.dtype:
        product = torch.mm(grad.t(), x)
        _ = into.add_(product) if add else into.copy_(product)
    elif add:
        into.addmm_(grad.t(), x)
    else:
        torch.mm(grad.t(), x, out=into)


def add_bias_gradient(grad: Tensor, into: Tensor, add: bool) -> None:
    """The sum of grad [m, n] over its rows, written into (or added to) `into` [n]; summed in the dtype of `into`."""
    total = grad.sum(0, dtype=into.dtype)
    _ = into.add_(total) if add else into.copy_(total)
