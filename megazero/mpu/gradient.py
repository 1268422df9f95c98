"""Gradient targets: buffers into which a layer's backward adds a parameter's gradient directly.

A weight-gradient GEMM can add its result to an fp32 buffer at once (Megatron-LM's gradient accumulation fusion).
Autograd would make the gradient as a tensor of its own, round it to the parameter's dtype and add it in another pass.
Of a weight that is used twice it would add both parts in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megazero.mpu.parameter import Parameter

Write = Callable[[Tensor, bool], None]
"""write(into, add): write a gradient into `into`, or add it to `into` if `add`.

`into` is contiguous, has the parameter's shape, and a dtype at least as wide as the parameter's.
"""


class GradientTarget(Protocol):
    """The type of a parameter's `gradient_target`, which a model state sets when it takes over the parameter."""

    def add(self, write: Write) -> None:
        """Call `write` once, now or later in this step. Its tensors are kept until then.

        For an embedding or a head it is called now: the logits that its gradient is made from are soon overwritten.
        """


def route_gradient(parameter: Tensor, target: GradientTarget | None, write: Write) -> Tensor | None:
    """Pass `write` to the target and return None; without a target return the gradient, as autograd expects it.

    target: `target_of(parameter)`, which forward must read: backward gets saved tensors, which are no `Parameter`.
    """
    if target is not None:
        target.add(write)
        return None
    gradient = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    write(gradient, False)
    return gradient


def target_of(parameter: Tensor) -> GradientTarget | None:
    """The parameter's gradient target, if it has one."""
    return parameter.gradient_target if isinstance(parameter, Parameter) else None
