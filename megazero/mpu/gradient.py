"""Gradient targets: where a parameter's gradient is summed, for backward passes that write it there themselves.

A matrix product can add its result to the fp32 sum at once. Through autograd it would be made in the parameter's own
dtype, rounded, kept whole beside the sum, and added in a pass of its own; and a weight used twice would have its two
parts added in 16 bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megazero.mpu.parameter import Parameter

Write = Callable[[Tensor, bool], None]
"""write(into, add): put a gradient into a contiguous tensor of the parameter's shape and any dtype at least as wide,
over what is there, or added to it.
"""


class GradientTarget(Protocol):
    """What a parameter's `gradient_target` is once a model state has adopted it."""

    def add(self, write: Write) -> None:
        """Have `write` called now or later in this step, once; what it holds is kept until then.

        For an embedding or head now: the logits that their gradient is made of are soon overwritten.
        """


def hand_over(parameter: Tensor, target: GradientTarget | None, write: Write) -> Tensor | None:
    """Give a gradient to the target, or where there is none make it and return it, as autograd expects it.

    target: `target_of(parameter)`, read in forward: a backward sees saved tensors, not parameters.
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
