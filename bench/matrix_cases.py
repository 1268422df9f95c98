"""Cases of ops that consist of matrix products: attention, and the three products of a linear layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import BothWays, Case, Sizes, with_gradient


def attention(z: Sizes, written_out: bool = False) -> Case:
    """Causal attention with ALiBi, from the projection to the context; torch gets the bias as an additive mask."""
    from fused_ops.attention import causal_attention
    from fused_ops.softmax import alibi_slopes

    slopes = torch.tensor(alibi_slopes(z.n))
    future = torch.full((z.s, z.s), -math.inf).triu(1)
    mask = (slopes.view(-1, 1, 1) * torch.arange(z.s) + future).to(z.dtype)[None]

    def ours(mixed: Tensor) -> Tensor:
        return causal_attention(mixed, z.n, 1, z.d, scale=z.d**-0.5, slopes=slopes, documents=None)

    def theirs(mixed: Tensor) -> Tensor:
        query, key, value = mixed.view(z.s, z.b, z.n, 3, z.d).permute(3, 1, 2, 0, 4).unbind(0)
        if not written_out:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        scores = (query @ key.transpose(-1, -2)) * z.d**-0.5 + mask
        return torch.softmax(scores, dim=-1) @ value

    name = "attention, torch written out" if written_out else "attention"
    mixed = z.random(z.s, z.b, 3 * z.h)
    moved = 2 * (8 * mixed.numel() // 3 + 2 * mixed.numel() // 3)
    products = 7 * 2 * z.b * z.n * z.s * z.s * z.d / 2  # two forward, five backward, half of each under the diagonal
    return Case(
        name,
        f"b{z.b} n{z.n} s{z.s} d{z.d}",
        with_gradient(mixed.numel() // 3, mixed),
        BothWays(ours),
        BothWays(theirs),
        moved,
        products,
    )


def attention_written_out(z: Sizes) -> Case:
    return attention(z, written_out=True)


def linear(z: Sizes, part: str, of_head: bool) -> Case:
    """The product of x [N, h] with a weight [f, h], or with the head's [v, h]."""
    from fused_ops.linear import add_weight_gradient, input_gradient
    from fused_ops.linear import linear as op

    out = z.v if of_head else z.f
    x, weight, grad = z.random(z.tokens, z.h), z.random(out, z.h, scale=0.02), z.random(z.tokens, out)
    into = torch.zeros(out, z.h)
    parts: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "forward": (torch.no_grad()(lambda: op(x, weight, None)), lambda: F.linear(x, weight)),
        "input gradient": (lambda: input_gradient(grad, weight), lambda: grad @ weight),
        "weight gradient": (lambda: add_weight_gradient(grad, x, into, True), lambda: into.add_(grad.t() @ x)),
    }
    ours, theirs = parts[part]
    moved = 2 * (x.numel() + weight.numel() + grad.numel()) + (6 * into.numel() if part == "weight gradient" else 0)
    shape = f"{z.tokens} x {z.h} x {out}"
    return Case(
        f"{'head' if of_head else 'linear'} {part}", shape, tuple, ours, theirs, moved, 2 * z.tokens * z.h * out
    )


def linear_part(part: str, of_head: bool = False) -> Callable[[Sizes], Case]:
    return lambda z: linear(z, part, of_head)
