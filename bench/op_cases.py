"""The ops that are timed, each a function from sizes to a `Case`: a new row is a new function in the table below.

b micro-batch, s sequence, n heads, d head dim, h hidden, f ffn width, v vocabulary, N = b*s tokens, e bytes of an
element. Both sides get the same fresh tensors each time and run forward and backward. Imports are inside the functions,
so that a missing op skips its own row only. Tensors are made on torch's default device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.adam_cases import adam, adam_against
from bench.case import BothWays, Case, Sizes, with_gradient
from bench.matrix_cases import attention, attention_written_out, linear_part


def passes(
    z: Sizes, name: str, moves: str, tensors: tuple[Tensor, ...], ours: Any, theirs: Any, counts: tuple[float, float]
) -> Case:
    """A case over rows. The first tensor, as large as the result, is moved `counts` (forward, backward) times."""
    first = tensors[0]
    shape = " x ".join(map(str, first.shape))
    forward, backward = (count * first.nbytes for count in counts)
    dtype = str(z.dtype).removeprefix("torch.")
    prepare = with_gradient(first.numel(), *tensors)
    return Case(name, shape, prepare, BothWays(ours), BothWays(theirs), forward + backward, 0.0, dtype, forward, moves)


def softmax(z: Sizes) -> Case:
    """Scaled causal softmax with ALiBi, in place; torch adds the bias as a mask."""
    from fused_ops.softmax import alibi_slopes, scaled_causal_alibi_softmax

    slopes = torch.tensor(alibi_slopes(z.n))
    mask = (slopes.view(-1, 1, 1) * torch.arange(z.s) + torch.full((z.s, z.s), -math.inf).triu(1)).to(z.dtype)
    moves = (
        "half of the scores lies under the diagonal: read, all written; half of probabilities and gradient read, "
        "half written"
    )
    return passes(
        z,
        "softmax",
        moves,
        (z.random(z.b, z.n, z.s, z.s),),
        lambda x: scaled_causal_alibi_softmax(x, 0.125, slopes),
        lambda x: torch.softmax(x * 0.125 + mask, dim=-1),
        (1.5, 1.5),
    )


MAP = "x read, y written; x and dy read, dx written"


def bias_gelu(z: Sizes) -> Case:
    from fused_ops.activation import gelu_tanh

    tensors = z.random(z.tokens, z.f), z.random(z.f)
    return passes(
        z, "bias + tanh gelu", MAP, tensors, gelu_tanh, lambda x, bias: F.gelu(x + bias, approximate="tanh"), (2, 3)
    )


def gelu_alone(z: Sizes) -> Case:
    from fused_ops.activation import gelu_tanh

    tensors = z.random(z.tokens, z.f), z.random(z.f)
    return passes(
        z,
        "bias + tanh gelu, torch without bias",
        MAP,
        tensors,
        gelu_tanh,
        lambda x, bias: F.gelu(x, approximate="tanh"),
        (2, 3),
    )


def swiglu(z: Sizes) -> Case:
    from fused_ops.gated import swiglu as op

    tensors = z.random(z.tokens, z.f), z.random(z.tokens, z.f)
    moves = "gate and up read, y written; gate, up and dy read, two gradients written"
    return passes(z, "swiglu", moves, tensors, op, lambda gate, up: F.silu(gate) * up, (3, 5))


def cross_entropy(z: Sizes, widened: bool = False) -> Case:
    """Mean loss and the gradient of the logits. widened: torch computes it in fp32, as transformers does; else in the
    dtype of the logits.
    """
    from megazero.mpu.cross_entropy import vocab_parallel_cross_entropy
    from megazero.mpu.grid import Group

    logits, labels, alone = z.random(z.tokens, z.v), torch.randint(z.v, (z.tokens,)), Group((0,), 0, None)

    def ours(x: Tensor, labels: Tensor) -> Tensor:
        # Not on the clone itself, which is a leaf: the op writes the gradient over its input.
        return vocab_parallel_cross_entropy(x.view_as(x), labels, alone, vocab=z.v).mean()

    def theirs(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x.float() if widened else x.view_as(x), labels)

    name = "cross-entropy, torch in fp32" if widened else "cross-entropy"
    dtype, moves = str(z.dtype).removeprefix("torch."), "logits read; logits read, gradient written"
    prepare = with_gradient(1, logits, labels)
    sizes = 3 * logits.nbytes, 0.0, dtype, logits.nbytes
    return Case(name, f"{z.tokens} x {z.v}", prepare, BothWays(ours), BothWays(theirs), *sizes, moves)


def cross_entropy_widened(z: Sizes) -> Case:
    return cross_entropy(z, widened=True)


def layer_norm(z: Sizes) -> Case:
    from fused_ops.layernorm import layer_norm as op

    tensors = z.random(z.tokens, z.h), z.random(z.h), z.random(z.h)
    theirs = lambda x, w, b: F.layer_norm(x, (z.h,), w, b, 1e-5)  # noqa: E731
    return passes(z, "layernorm", MAP, tensors, lambda x, w, b: op(x, w, b, 1e-5), theirs, (2, 3))


def rms_norm(z: Sizes) -> Case:
    from fused_ops.layernorm import rms_norm as op

    tensors = z.random(z.tokens, z.h), z.random(z.h)
    theirs = lambda x, w: F.rms_norm(x, (z.h,), w, 1e-5)  # noqa: E731
    return passes(z, "rmsnorm", MAP, tensors, lambda x, w: op(x, w, 1e-5), theirs, (2, 3))


def add_layer_norm(z: Sizes) -> Case:
    """A norm after adding the residual. Sum and norm both have a gradient, each with memory of its own."""
    from fused_ops.layernorm import add_layer_norm as op

    of_sum = z.random(z.tokens, z.h)

    def theirs(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        total = x + residual
        return _both(total, F.layer_norm(total, (z.h,), w, b, 1e-5), of_sum)

    def ours(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return _both(*op(x, residual, w, b, 1e-5), of_sum)

    tensors = z.random(z.tokens, z.h), z.random(z.tokens, z.h), z.random(z.h), z.random(z.h)
    moves = "x and residual read, sum and y written; sum and both gradients read, one written"
    return passes(z, "residual + layernorm", moves, tensors, ours, theirs, (4, 4))


class _Both(torch.autograd.Function):
    """The second of two results; the gradient of the first is given."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, normalised: Tensor, of_total: Tensor) -> Tensor:
        ctx.save_for_backward(of_total)
        return normalised.view_as(normalised)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.saved_tensors[0], grads[0], None


def _both(total: Tensor, normalised: Tensor, of_total: Tensor) -> Tensor:
    result: Tensor = _Both.apply(total, normalised, of_total)
    return result


def dropout(z: Sizes) -> Case:
    """residual + dropout(x + bias)."""
    from fused_ops.dropout import bias_dropout_residual

    keys = torch.randint(2**62, (z.tokens,))
    tensors = z.random(z.tokens, z.h), z.random(z.h), z.random(z.tokens, z.h)
    theirs = lambda x, bias, residual: residual + F.dropout(x + bias, 0.1)  # noqa: E731
    ours = lambda x, bias, residual: bias_dropout_residual(x, bias, residual, keys, 0.1)  # noqa: E731
    return passes(
        z,
        "bias + dropout + residual",
        "x and residual read, y written; dy read, dx written",
        tensors,
        ours,
        theirs,
        (3, 2),
    )


def rotary(z: Sizes) -> Case:
    from fused_ops.rotary import apply_rotary, rotary_tables
    from megazero.config.rotary import RotarySettings

    cos, sin = (table[:, None, None] for table in rotary_tables(torch.arange(z.s), z.d, RotarySettings(), z.dtype))
    whole = torch.cat([cos, cos], -1).to(z.dtype), torch.cat([sin, sin], -1).to(z.dtype)

    def theirs(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * whole[0] + torch.cat([-second, first], -1) * whole[1]

    tensors = (z.random(z.s, z.b, z.n, z.d),)
    return passes(
        z,
        "rotary",
        "x read, y written; dy read, dx written",
        tensors,
        lambda x: apply_rotary(x, cos, sin),
        theirs,
        (2, 2),
    )


def sum_of_squares(z: Sizes) -> Case:
    """The norm of a flat fp32 gradient, summed in fp64; torch's norm sums in fp32."""
    from fused_ops.norm import sum_of_squares as op

    x = torch.randn(z.parameters)
    theirs = lambda: torch.linalg.vector_norm(x)  # noqa: E731
    return Case(
        "sum of squares",
        f"{z.parameters:,}",
        tuple,
        lambda: op(x),
        theirs,
        x.nbytes,
        0.0,
        "float32",
        moves="the gradient read",
    )


PARTS = 4
"""Rows that are added up: what as many ranks have sent."""


def blocks_of(bits: int) -> Callable[[Sizes], Case]:
    """A flat gradient into blocks of int8 or int4; torch writes the codes of whole blocks, each in a byte."""

    def case(z: Sizes) -> Case:
        from fused_ops.quantise import BLOCK, LARGEST_CODE, packed_bytes, quantise

        x = torch.randn(1, z.parameters).to(z.dtype)
        whole = x[0, : z.parameters // BLOCK * BLOCK].view(-1, BLOCK)

        def theirs() -> tuple[Tensor, Tensor]:
            scale = whole.abs().amax(1, keepdim=True).float() / LARGEST_CODE[bits]
            return (whole / scale).round().to(torch.int8), scale

        bytes_ = x.nbytes + packed_bytes(z.parameters, bits)
        dtype, moves = str(z.dtype).removeprefix("torch."), "the gradient read, codes and scales written"
        shape = f"{z.parameters:,}"
        return Case(
            f"int{bits} blocks", shape, tuple, lambda: quantise(x, bits), theirs, bytes_, 0.0, dtype, moves=moves
        )

    return case


def sum_of_blocks(z: Sizes) -> Case:
    """Parts in int4 added up; torch adds up as many 16-bit parts."""
    from fused_ops.quantise import BLOCK, code_bytes, quantise, sum_dequantised

    packed, out = quantise(torch.randn(PARTS, z.parameters), 4), torch.empty(z.parameters, dtype=z.dtype)
    plain = torch.randn(PARTS, z.parameters).to(torch.bfloat16)
    bytes_ = PARTS * (code_bytes(z.parameters, 4) + 4 * -(-z.parameters // BLOCK)) + out.nbytes
    dtype, moves = str(z.dtype).removeprefix("torch."), f"codes and scales of {PARTS} parts read, the sum written"
    ours = lambda: sum_dequantised(packed, 4, out)  # noqa: E731
    theirs = lambda: plain.sum(0, dtype=torch.float32).to(z.dtype)  # noqa: E731
    return Case(
        "sum of int4 blocks", f"{PARTS} x {z.parameters:,}", tuple, ours, theirs, bytes_, 0.0, dtype, moves=moves
    )


CASES: dict[str, Callable[[Sizes], Case]] = {
    "attention": attention,
    "attention, torch written out": attention_written_out,
    "softmax": softmax,
    "bias + tanh gelu": bias_gelu,
    "bias + tanh gelu, torch without bias": gelu_alone,
    "swiglu": swiglu,
    "cross-entropy": cross_entropy,
    "cross-entropy, torch in fp32": cross_entropy_widened,
    "layernorm": layer_norm,
    "residual + layernorm": add_layer_norm,
    "rmsnorm": rms_norm,
    "bias + dropout + residual": dropout,
    "rotary": rotary,
    "sum of squares": sum_of_squares,
    "int8 blocks": blocks_of(8),
    "int4 blocks": blocks_of(4),
    "sum of int4 blocks": sum_of_blocks,
    "adam": adam,
    "adam against torch, equal work": adam_against("torch, equal work"),
    "adam against DeepSpeed": adam_against("DeepSpeed"),
    "adam against apex": adam_against("apex"),
    "linear forward": linear_part("forward"),
    "linear input gradient": linear_part("input gradient"),
    "linear weight gradient": linear_part("weight gradient"),
    "head forward": linear_part("forward", of_head=True),
    "head input gradient": linear_part("input gradient", of_head=True),
    "head weight gradient": linear_part("weight gradient", of_head=True),
}
