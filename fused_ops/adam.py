"""Adam, AdamW and SGD on flat tensors, and the moving average of the weights behind them.

All tensors have one length n: `master` (fp32 or fp64), moments of its dtype, `grad` of any floating dtype, `param_out`
of a 16-bit dtype, or None where the master is the parameter itself. `multiplier` (clip coefficient / loss scale) and
`skip` (bool) are 0-dim tensors, so that on a GPU the host never waits for them. A skipped step leaves the bits of all
tensors unchanged, whatever the gradient is. The reference body works in blocks, so that its temporaries stay in the
cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_ops.blocks import block_elements
from fused_ops.native.library import SUFFIXES, Library, kernels, suffix


class AdamRange(NamedTuple):
    """The tensors of a step, and the weight decay of their range."""

    param_out: Tensor | None
    master: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight_decay: float


class _Numbers(NamedTuple):
    """The arguments of `adam_steps` that all ranges share."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decoupled: bool
    step: Tensor
    multiplier: Tensor
    skip: Tensor


def _blocks(n: int, device: torch.device) -> Iterator[slice]:
    size = block_elements(device)
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _is_readable(scalar: Tensor) -> bool:
    """Whether the host may read a scalar without waiting for a device."""
    return scalar.device.type == "cpu"


def _library(param_out: Tensor | None, grad: Tensor, *state: Tensor) -> tuple[Library | None, str]:
    """(kernels, suffix of the kernel's name: dtypes of gradient and output), if the kernels can take these tensors."""
    library = kernels(*state) if state[0].dtype == torch.float32 else None
    out = torch.float32 if param_out is None else param_out.dtype
    flat = all(tensor.is_contiguous() for tensor in (grad, *state)) and (param_out is None or param_out.is_contiguous())
    if library is None or not flat or grad.dtype not in SUFFIXES or out not in SUFFIXES:
        return None, ""
    return library, f"{suffix(grad.dtype)}_{suffix(out)}"


def _changed(*tensors: Tensor | None) -> None:
    increment_version([tensor for tensor in tensors if tensor is not None])


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _scaled(grad: Tensor, multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * multiplier in a new tensor of the master's dtype. It is converted before it is multiplied."""
    return torch.empty(grad.shape, dtype=dtype, device=grad.device).copy_(grad).mul_(multiplier)


@torch.no_grad()
def adam_steps(
    ranges: Sequence[AdamRange],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decoupled: bool,
    step: Tensor,
    multiplier: Tensor,
    skip: Tensor,
) -> None:
    """`adam_step` on each of the ranges. On a GPU those of the same dtypes are one launch (of up to 32 of them)."""
    together: dict[tuple[Library, str], list[AdamRange]] = {}
    for own in ranges:
        library, name = _library(own.param_out, own.grad, own.master, own.exp_avg, own.exp_avg_sq)
        if library is not None and library.on_device:
            together.setdefault((library, name), []).append(own)
        else:
            _adam_range(own, library, name, _Numbers(lr, beta1, beta2, eps, decoupled, step, multiplier, skip))
    for (library, name), several in together.items():
        table = tuple(value for own in several for value in _described(own, lr, decoupled))
        numbers = lr, _log(beta1), _log(beta2), 1 - beta1, beta2, 1 - beta2, eps
        scalars = step.double(), multiplier.double(), skip
        library.call(f"adam_on_device_{name}", len(several), table, *scalars, *map(float, numbers))
        _changed(*(tensor for own in several for tensor in (own.param_out, own.master, own.exp_avg, own.exp_avg_sq)))


def _factors(weight_decay: float, lr: float, decoupled: bool) -> tuple[float, float]:
    """(factor of the weight, factor of the weight in the gradient)."""
    return (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)


def _described(own: AdamRange, lr: float, decoupled: bool) -> tuple[Tensor | int | float | None, ...]:
    """A `Described` of csrc/cuda/adam.cu."""
    return *own[:5], own.master.numel(), *map(float, _factors(own.weight_decay, lr, decoupled))


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
    """One step, in place. step: 0-dim float64, the number of this step from 1. decoupled: AdamW; else Adam with L2
    decay.

    g = grad * multiplier (+ weight_decay * w);  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
    w = w (1 - lr weight_decay) - lr/(1-b1^step) * m / (sqrt(v)/sqrt(1-b2^step) + eps)
    (Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101; the order of torch.optim.AdamW.)
    """
    own = AdamRange(param_out, master, grad, exp_avg, exp_avg_sq, weight_decay)
    adam_steps(
        [own],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        decoupled=decoupled,
        step=step,
        multiplier=multiplier,
        skip=skip,
    )


def _adam_range(own: AdamRange, library: Library | None, name: str, numbers: _Numbers) -> None:
    """A step of one range by the CPU kernel, or by the reference body."""
    lr, beta1, beta2, eps, decoupled, step, multiplier, skip = numbers
    param_out, master, grad, exp_avg, exp_avg_sq, weight_decay = own
    shrink, decay = _factors(weight_decay, lr, decoupled)
    on_host = _is_readable(skip)
    if on_host and bool(skip):
        return
    step_size = lr / (1 - beta1**step)
    root = (1 - beta2**step).sqrt()
    if library is not None and on_host:
        given = float(step_size), float(root), shrink, decay, 1 - beta1, beta2, 1 - beta2, eps, float(multiplier)
        library.call(f"adam_{name}", master.numel(), param_out, master, grad, exp_avg, exp_avg_sq, *map(float, given))
        _changed(param_out, master, exp_avg, exp_avg_sq)
        return
    for at in _blocks(master.numel(), master.device):
        w, m, v = master[at], exp_avg[at], exp_avg_sq[at]
        g = _scaled(grad[at], multiplier, master.dtype)
        if weight_decay and not decoupled:
            g.add_(w, alpha=weight_decay)
        if on_host:
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            torch.sqrt(v, out=g).div_(root).add_(eps)
            if shrink != 1.0:
                w.mul_(shrink)
            w.addcdiv_(m, g, value=-float(step_size))
        else:
            new_m = torch.lerp(m, g, 1 - beta1)
            new_v = (v * beta2).addcmul_(g, g, value=1 - beta2)
            update = torch.sqrt(new_v, out=g).div_(root).add_(eps).reciprocal_().mul_(new_m).mul_(step_size)
            new_w = (w * shrink).sub_(update)
            for old, new in ((m, new_m), (v, new_v), (w, new_w)):
                torch.where(skip, old, new, out=old)
        if param_out is not None:
            _write(param_out[at], w, skip, on_host)


@torch.no_grad()
def sgd_step(
    param_out: Tensor | None,
    master: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    multiplier: Tensor,
    skip: Tensor,
) -> None:
    """One step of torch.optim.SGD, in place.

    g = grad * multiplier + weight_decay * w;  u = momentum * u + g;  w -= lr * u
    """
    library, name = _library(param_out, grad, master, momentum_buffer)
    if library is not None and library.on_device:
        table = param_out, master, grad, momentum_buffer, None, master.numel(), 1.0, float(weight_decay)
        library.call(f"sgd_on_device_{name}", 1, table, multiplier.double(), skip, float(lr), float(momentum))
        _changed(param_out, master, momentum_buffer)
        return
    on_host = _is_readable(skip)
    if on_host and bool(skip):
        return
    if library is not None and on_host:
        numbers = float(lr), float(momentum), float(weight_decay), float(multiplier)
        library.call(f"sgd_{name}", master.numel(), param_out, master, grad, momentum_buffer, *numbers)
        _changed(param_out, master, momentum_buffer)
        return
    for at in _blocks(master.numel(), master.device):
        w, u = master[at], momentum_buffer[at]
        g = _scaled(grad[at], multiplier, master.dtype)
        if weight_decay:
            g.add_(w, alpha=weight_decay)
        if on_host:
            u.mul_(momentum).add_(g)
            w.add_(u, alpha=-lr)
        else:
            new_u = (u * momentum).add_(g)
            new_w = torch.add(w, new_u, alpha=-lr)
            for old, new in ((u, new_u), (w, new_w)):
                torch.where(skip, old, new, out=old)
        if param_out is not None:
            _write(param_out[at], w, skip, on_host)


@torch.no_grad()
def average_step(average: Tensor, master: Tensor, *, decay: float, skip: Tensor) -> None:
    """The moving average of the weights behind a step, in place: average = decay * average + (1 - decay) * master.

    average  of master's dtype
    """
    if _is_readable(skip):
        if not skip:
            average.lerp_(master, 1 - decay)
        return
    for at in _blocks(master.numel(), master.device):
        # A weight of zero for a skipped step was rejected: -0.0 would become 0.0.
        torch.where(skip, average[at], torch.lerp(average[at], master[at], 1 - decay), out=average[at])


def _write(param_out: Tensor, w: Tensor, skip: Tensor, on_host: bool) -> None:
    """Round the master into the 16-bit parameter, unless the step is skipped."""
    if on_host:
        param_out.copy_(w)
    else:
        torch.where(skip, param_out, w.to(param_out.dtype), out=param_out)
