"""Adam, timed against torch's, DeepSpeed's and apex's: a row for each rival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.case import BF16, Case, Sizes


def adam_state(z: Sizes) -> tuple[Tensor, ...]:
    """Parameter, master, gradient and two moments, each one flat tensor, so that launches do not dominate the time."""
    master, gradient = torch.randn(z.parameters), torch.randn(z.parameters) * 1e-3
    return master.to(BF16), master, gradient, torch.zeros(z.parameters), torch.zeros(z.parameters)


def written_out_adam(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> None:
    """AdamW in torch ops, which a compiler can fuse into one pass."""
    m.lerp_(g, 0.1)
    v.mul_(0.95).addcmul_(g, g, value=0.05)
    root = (v / (1 - 0.95**step)).sqrt() + 1e-8
    w.mul_(1 - 1e-3 * 0.1).sub_(1e-3 / (1 - 0.9**step) * m / root)


def adam(z: Sizes, rival: str = "torch") -> Case:
    """Ours also multiplies by the clip coefficient and writes the 16-bit parameters. The rival's step does neither,
    except "torch, equal work", which does both in separate passes, and apex, which ours calls in its own step.
    """
    from fused_ops.adam import adam_step

    state, step, coefficient, skip = (
        adam_state(z),
        torch.tensor(0.0, dtype=torch.float64),
        torch.tensor(0.5),
        torch.tensor(False),
    )
    numbers: dict[str, Any] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled": True,
    }
    numbers |= {"step": step, "multiplier": coefficient, "skip": skip}

    def ours() -> None:
        step.add_(1)
        adam_step(*state, **numbers)

    parameter = state[1].clone()
    parameter.grad = state[2]
    narrow, clip = (
        torch.empty_like(state[0]),
        torch.tensor(1.0),
    )  # the gradient stays what it is, however often it is multiplied
    equal, count = rival == "torch, equal work", torch.tensor(1.0)
    take = rivals_step(rival, parameter, state, numbers)

    def theirs() -> None:
        if equal:
            state[2].mul_(clip)
        take()
        if equal:
            narrow.copy_(parameter.detach())

    def to_compile() -> None:
        g = state[2] * clip if equal else state[2]
        written_out_adam(parameter, g, state[3], state[4], count)
        if equal:
            narrow.copy_(parameter)

    name = "adam" if rival == "torch" else f"adam against {rival}"
    moves = "weight, gradient and two moments read in fp32, all but the gradient written, and the 16-bit weight"
    to = None if rival in ("DeepSpeed", "apex") else to_compile
    return Case(
        name, f"{z.parameters:,}", tuple, ours, theirs, 30 * z.parameters, 0.0, "float32", moves=moves, to_compile=to
    )


def rivals_step(
    rival: str, parameter: Tensor, state: tuple[Tensor, ...], numbers: dict[str, Any]
) -> Callable[[], object]:
    """The step of an optimizer over `parameter`, whose gradient is set; for apex, over the state itself.

    ImportError where it is missing.
    """
    if rival == "apex":
        from fused_ops import apex

        if missing := apex.unavailable_reason():
            raise ImportError(missing)
        return lambda: apex.adam_step(*state, **{**numbers, "step": torch.ones_like(numbers["step"])})
    if rival == "DeepSpeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
    else:
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return lambda: optimizer.step()


def adam_against(rival: str) -> Callable[[Sizes], Case]:
    return lambda z: adam(z, rival)
