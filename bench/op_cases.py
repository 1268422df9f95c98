"""The ops that `bench/ops.py` times, each a function from sizes to a `Case`: a new row is a new function in the table below.

b micro-batch, s sequence, n heads, d head dim, h hidden, f ffn width, v vocabulary, N = b*s tokens. Both sides get the same
fresh tensors each time and run forward and backward; imports stand inside, so that an op that is not there skips its row only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """Those of W1, the vocabulary of W2."""

    b: int = 4
    s: int = 512
    n: int = 8
    d: int = 64
    f: int = 2048
    v: int = 50304
    parameters: int = 50_000_000

    @classmethod
    def tiny(cls) -> Sizes:
        return cls(2, 16, 2, 8, 64, 128, 4096)

    @property
    def h(self) -> int:
        return self.n * self.d

    @property
    def tokens(self) -> int:
        return self.b * self.s


@dataclass(frozen=True)
class Case:
    """prepare makes the tensors of one repetition. bytes and flops are the least that forward and backward need."""

    name: str
    shape: str
    prepare: Callable[[], tuple[Tensor, ...]]
    ours: Callable[..., object]
    theirs: Callable[..., object]
    bytes: float = 0.0
    flops: float = 0.0
    dtype: str = "bfloat16"


def fresh(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Clones that need gradients: what an op overwrites is there again next time."""
    return lambda: tuple(tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors)


def with_gradient(result: int, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """As `fresh`, and the gradient of a result of so many elements: to make it is not the op's work."""
    return lambda: (*fresh(*tensors)(), torch.ones(result, dtype=tensors[0].dtype))


def both_ways(function: Callable[..., Tensor]) -> Callable[..., None]:
    """Forward, and backward from the gradient that comes last."""

    def run(*tensors: Tensor) -> None:
        out = function(*tensors[:-1])
        out.backward(tensors[-1].view(out.shape))

    return run


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(BF16)


def attention(z: Sizes, written_out: bool = False) -> Case:
    """Causal with ALiBi, from the projection to the context; torch gets the bias as an additive mask."""
    from fused_ops.attention import causal_attention
    from fused_ops.softmax import alibi_slopes

    slopes = torch.tensor(alibi_slopes(z.n))
    future = torch.full((z.s, z.s), -math.inf).triu(1)
    mask = (slopes.view(-1, 1, 1) * torch.arange(z.s) + future).to(BF16)[None]

    def ours(mixed: Tensor) -> Tensor:
        return causal_attention(mixed, z.n, 1, z.d, scale=z.d**-0.5, slopes=slopes, documents=None)

    def theirs(mixed: Tensor) -> Tensor:
        query, key, value = mixed.view(z.s, z.b, z.n, 3, z.d).permute(3, 1, 2, 0, 4).unbind(0)
        if not written_out:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        scores = (query @ key.transpose(-1, -2)) * z.d**-0.5 + mask
        return torch.softmax(scores, dim=-1) @ value

    name = "attention, torch written out" if written_out else "attention"
    mixed = random(z.s, z.b, 3 * z.h)
    moved = 2 * (8 * mixed.numel() // 3 + 2 * mixed.numel() // 3)
    products = 7 * 2 * z.b * z.n * z.s * z.s * z.d / 2  # two forward, five backward, half of each under the diagonal
    return Case(
        name, f"b{z.b} n{z.n} s{z.s} d{z.d}", with_gradient(mixed.numel() // 3, mixed), both_ways(ours), both_ways(theirs), moved, products
    )


def attention_written_out(z: Sizes) -> Case:
    return attention(z, written_out=True)


def softmax(z: Sizes) -> Case:
    """Scaled, causal, with ALiBi, in place; torch adds the bias as a mask."""
    from fused_ops.softmax import alibi_slopes, scaled_causal_alibi_softmax

    slopes = torch.tensor(alibi_slopes(z.n))
    mask = (slopes.view(-1, 1, 1) * torch.arange(z.s) + torch.full((z.s, z.s), -math.inf).triu(1)).to(BF16)
    scores = random(z.b, z.n, z.s, z.s)
    ours = both_ways(lambda x: scaled_causal_alibi_softmax(x, 0.125, slopes))
    theirs = both_ways(lambda x: torch.softmax(x * 0.125 + mask, dim=-1))
    # Half of it is under the diagonal: read, written; probabilities and gradient read, gradient written. The rest is set to 0.
    return Case(
        "softmax", f"b{z.b} n{z.n} s{z.s}", with_gradient(scores.numel(), scores), ours, theirs, 2 * scores.numel() * (5 / 2 + 1 / 2)
    )


def bias_gelu(z: Sizes) -> Case:
    from fused_ops.activation import gelu_tanh

    x, bias = random(z.tokens, z.f), random(z.f)
    theirs = both_ways(lambda x, bias: F.gelu(x + bias, approximate="tanh"))
    return Case(
        "bias + tanh gelu", f"{z.tokens} x {z.f}", with_gradient(x.numel(), x, bias), both_ways(gelu_tanh), theirs, 2 * 5 * x.numel()
    )


def gelu_alone(z: Sizes) -> Case:
    from fused_ops.activation import gelu_tanh

    x, bias = random(z.tokens, z.f), random(z.f)
    theirs = both_ways(lambda x, bias: F.gelu(x, approximate="tanh"))
    name = "bias + tanh gelu, torch without bias"
    return Case(name, f"{z.tokens} x {z.f}", with_gradient(x.numel(), x, bias), both_ways(gelu_tanh), theirs, 2 * 5 * x.numel())


def swiglu(z: Sizes) -> Case:
    from fused_ops.swiglu import swiglu as op

    gate, up = random(z.tokens, z.f), random(z.tokens, z.f)
    theirs = both_ways(lambda gate, up: F.silu(gate) * up)
    return Case("swiglu", f"{z.tokens} x {z.f}", with_gradient(gate.numel(), gate, up), both_ways(op), theirs, 2 * 8 * gate.numel())


def cross_entropy(z: Sizes) -> Case:
    """Mean loss and the gradient of the logits."""
    from megazero.mpu.cross_entropy import vocab_parallel_cross_entropy
    from megazero.mpu.grid import Group

    logits, labels, alone = random(z.tokens, z.v), torch.randint(z.v, (z.tokens,)), Group((0,), 0, None)

    def ours(x: Tensor, labels: Tensor) -> None:
        # Not on the clone itself, which is a leaf: the op writes the gradient over its input.
        vocab_parallel_cross_entropy(x.view_as(x), labels, alone, vocab=z.v).mean().backward()

    def theirs(x: Tensor, labels: Tensor) -> None:
        F.cross_entropy(x.view_as(x), labels).backward()

    return Case("cross-entropy", f"{z.tokens} x {z.v}", fresh(logits, labels), ours, theirs, 2 * 3 * logits.numel())


def layer_norm(z: Sizes) -> Case:
    from fused_ops.layernorm import layer_norm as op

    x, weight, bias = random(z.tokens, z.h), random(z.h), random(z.h)
    ours = both_ways(lambda x, w, b: op(x, w, b, 1e-5))
    theirs = both_ways(lambda x, w, b: F.layer_norm(x, (z.h,), w, b, 1e-5))
    return Case("layernorm", f"{z.tokens} x {z.h}", with_gradient(x.numel(), x, weight, bias), ours, theirs, 2 * 5 * x.numel())


def rms_norm(z: Sizes) -> Case:
    from fused_ops.layernorm import rms_norm as op

    x, weight = random(z.tokens, z.h), random(z.h)
    ours, theirs = both_ways(lambda x, w: op(x, w, 1e-5)), both_ways(lambda x, w: F.rms_norm(x, (z.h,), w, 1e-5))
    return Case("rmsnorm", f"{z.tokens} x {z.h}", with_gradient(x.numel(), x, weight), ours, theirs, 2 * 5 * x.numel())


def rotary(z: Sizes) -> Case:
    from fused_ops.rotary import apply_rotary, rotary_tables

    x = random(z.s, z.b, z.n, z.d)
    cos, sin = (table[:, None, None] for table in rotary_tables(torch.arange(z.s), z.d, 10000.0, BF16))
    whole = torch.cat([cos, cos], -1).to(BF16), torch.cat([sin, sin], -1).to(BF16)

    def theirs(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * whole[0] + torch.cat([-second, first], -1) * whole[1]

    ours = both_ways(lambda x: apply_rotary(x, cos, sin))
    return Case("rotary", f"s{z.s} b{z.b} n{z.n} d{z.d}", with_gradient(x.numel(), x), ours, both_ways(theirs), 2 * 4 * x.numel())


def adam_state(z: Sizes) -> tuple[Tensor, ...]:
    """Parameter, master, gradient, two moments: flat, so that the passes and not their number are measured."""
    master, gradient = torch.randn(z.parameters), torch.randn(z.parameters) * 1e-3
    return master.to(BF16), master, gradient, torch.zeros(z.parameters), torch.zeros(z.parameters)


def adam(z: Sizes, rival: str = "torch") -> Case:
    """Ours also multiplies by the clip coefficient and writes the 16-bit parameters; the rival's step does neither, unless
    it is "torch, equal work", which does both in passes of their own.
    """
    from fused_ops.adam import adam_step

    state, step, coefficient, skip = adam_state(z), torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.5), torch.tensor(False)
    numbers: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}

    def ours() -> None:
        step.add_(1)
        adam_step(*state, **numbers, step=step, multiplier=coefficient, skip=skip)

    parameter = state[1].clone()
    parameter.grad = state[2]
    if rival == "DeepSpeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
    else:
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    narrow, clip = torch.empty_like(state[0]), torch.tensor(1.0)  # the gradient stays what it is, however often it is multiplied

    def theirs() -> None:
        if rival == "torch, equal work":
            state[2].mul_(clip)
        optimizer.step()
        if rival == "torch, equal work":
            narrow.copy_(parameter.detach())

    name = "adam" if rival == "torch" else f"adam against {rival}"
    return Case(name, f"{z.parameters:,}", tuple, ours, theirs, 30 * z.parameters)


def adam_equal_work(z: Sizes) -> Case:
    return adam(z, "torch, equal work")


def adam_deepspeed(z: Sizes) -> Case:
    return adam(z, "DeepSpeed")


def linear(z: Sizes, part: str, of_head: bool) -> Case:
    """x [N, h] by weight [f, h], or the head's [v, h]."""
    from fused_ops.linear import add_weight_gradient, input_gradient
    from fused_ops.linear import linear as op

    out = z.v if of_head else z.f
    x, weight, grad = random(z.tokens, z.h), random(out, z.h, scale=0.02), random(z.tokens, out)
    into = torch.zeros(out, z.h)
    parts: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "forward": (lambda: op(x, weight, None), lambda: F.linear(x, weight)),
        "input gradient": (lambda: input_gradient(grad, weight), lambda: grad @ weight),
        "weight gradient": (lambda: add_weight_gradient(grad, x, into, True), lambda: into.add_(grad.t() @ x)),
    }
    ours, theirs = parts[part]
    moved = 2 * (x.numel() + weight.numel() + grad.numel()) + (6 * into.numel() if part == "weight gradient" else 0)
    shape = f"{z.tokens} x {z.h} x {out}"
    return Case(f"{'head' if of_head else 'linear'} {part}", shape, tuple, ours, theirs, moved, 2 * z.tokens * z.h * out)


def linear_part(part: str, of_head: bool = False) -> Callable[[Sizes], Case]:
    return lambda z: linear(z, part, of_head)


CASES: dict[str, Callable[[Sizes], Case]] = {
    "attention": attention,
    "attention, torch written out": attention_written_out,
    "softmax": softmax,
    "bias + tanh gelu": bias_gelu,
    "bias + tanh gelu, torch without bias": gelu_alone,
    "swiglu": swiglu,
    "cross-entropy": cross_entropy,
    "layernorm": layer_norm,
    "rmsnorm": rms_norm,
    "rotary": rotary,
    "adam": adam,
    "adam against torch, equal work": adam_equal_work,
    "adam against DeepSpeed": adam_deepspeed,
    "linear forward": linear_part("forward"),
    "linear input gradient": linear_part("input gradient"),
    "linear weight gradient": linear_part("weight gradient"),
    "head forward": linear_part("forward", of_head=True),
    "head input gradient": linear_part("input gradient", of_head=True),
    "head weight gradient": linear_part("weight gradient", of_head=True),
}
