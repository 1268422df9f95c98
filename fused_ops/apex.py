"""Adam by NVIDIA apex, if it is installed: the step of `fused_ops.adam` by `amp_C.multi_tensor_adam_capturable`.

apex is not on PyPI (the package apex there is another program). Of its variants of Adam, this one takes step, learning
rate and multiplier as tensors, and does nothing if its no-op flag is 1. The others ignore that flag: NaN would reach
the weights, or the host would have to read `skip` first.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_ops.adam import AdamRange
from fused_ops.blocks import DEVICE_ELEMENTS

CHUNK = 2048 * 32
"""Elements per thread block, as in apex's own code."""
FUNCTION = "multi_tensor_adam_capturable"


def extension() -> ModuleType | None:
    """apex's CUDA extension, if it can be imported and has the function; else None."""
    try:
        module = importlib.import_module("amp_C")
    except ImportError:
        return None
    return module if hasattr(module, FUNCTION) else None


def unavailable_reason() -> str | None:
    """What is missing, in a sentence; None if nothing is."""
    if extension() is not None:
        return None
    return (
        f"NVIDIA apex with its CUDA extensions (amp_C.{FUNCTION}) cannot be imported. It is not on PyPI, where apex is "
        "another program: "
        'APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "git+https://github.com/NVIDIA/apex"'
    )


@torch.no_grad()
def adam_step(
    param_out: Tensor | None,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: Tensor,
    multiplier: Tensor,
    skip: Tensor,
) -> None:
    """As `fused_ops.adam.adam_step`, for fp32 tensors on CUDA. `grad` is multiplied in place, unless the step is
    skipped.
    """
    apex, device = extension(), master.device
    assert apex is not None, unavailable_reason()
    assert all(tensor.dtype == torch.float32 for tensor in (master, grad, exp_avg, exp_avg_sq)), (
        "apex's Adam takes fp32 alone"
    )
    getattr(apex, FUNCTION)(
        CHUNK,
        skip.to(torch.int32).view(1),
        [[grad], [master], [exp_avg], [exp_avg_sq]],
        torch.full((1,), lr, dtype=torch.float32, device=device),
        beta1,
        beta2,
        eps,
        step.to(torch.int32).view(1),
        int(decoupled),
        1,  # moments are divided by 1 - beta^step
        weight_decay,
        multiplier.to(torch.float32).view(1),
    )
    increment_version([grad, master, exp_avg, exp_avg_sq])
    if param_out is not None:
        for out, weight in zip(param_out.split(DEVICE_ELEMENTS), master.split(DEVICE_ELEMENTS), strict=True):
            torch.where(skip, out, weight.to(out.dtype), out=out)


def adam_steps(ranges: Sequence[AdamRange], **numbers: Any) -> None:
    """`adam_step` on each of the ranges. numbers: as in `fused_ops.adam.adam_steps`."""
    for own in ranges:
        adam_step(*own[:5], weight_decay=own.weight_decay, **numbers)
