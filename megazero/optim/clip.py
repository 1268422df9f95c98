"""Clipping by the global gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for all gradients, 0-dim float64: min(1, max_norm / (norm + 1e-6)); 1 where max_norm is 0.

    norm: 0-dim, the gradient norm of the whole model, the same on every rank. The formula is that of
    `torch.nn.utils.clip_grad_norm_`. A norm of inf gives 0 and NaN gives NaN. Such a step must be skipped.
    """
    wide = norm.detach().to(torch.float64)
    if max_norm == 0.0:
        return torch.ones_like(wide)
    return (max_norm / (wide + 1e-6)).clamp(max=1.0)
