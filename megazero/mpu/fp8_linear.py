"""Linear layers whose three products run in FP8, with the communication of `mpu.linear`.

For backward the layer keeps the transposed FP8 copy of its input, half the bytes of the 16-bit input. Under sequence
parallelism it keeps the FP8 copy of this rank's part, not transposed, and both all-gathers send FP8: half the traffic.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_ops import fp8, linear
from fused_ops.compiled import runs_compiled
from megazero.config.inventory import FP8_MULTIPLE
from megazero.mpu.collectives import CommunicationHandle, all_gather, all_reduce, reduce_scatter
from megazero.mpu.fp8 import Fp8Layer
from megazero.mpu.gradient import Write, route_gradient, target_of
from megazero.mpu.grid import Group
from megazero.mpu.linear import adjacent_view, concatenated_bias


def _gather(rows: Tensor, group: Group) -> tuple[Tensor, CommunicationHandle]:
    """All-gather [m/t, k] -> [m, k]. FP8 values are sent as uint8, since not every backend knows FP8 dtypes."""
    whole = rows.new_empty((group.size * rows.shape[0], rows.shape[1]))
    if rows.element_size() == 1:
        return whole, all_gather(whole.view(torch.uint8), rows.view(torch.uint8), group)
    return whole, all_gather(whole, rows, group)


def _matrix(weights: tuple[Tensor, ...]) -> Tensor:
    """Weights [n_i, k] as one matrix [sum n_i, k]: a view, if they follow each other in memory."""
    merged = adjacent_view(weights)
    return torch.cat([weight.detach() for weight in weights]) if merged is None else merged


def _bias_gradient(grad: Tensor) -> Write:
    """The bias gradient, summed now: if it were deferred, it alone would keep the whole 16-bit gradient alive."""
    total = grad.new_empty(grad.shape[1], dtype=torch.float32)
    linear.add_bias_gradient(grad, total, False)
    return partial(linear.write_or_add, total)


class _Fp8Linear(torch.autograd.Function):
    """(x, layer, group, gathers, count of weights, compiled, *weights, *biases) -> [..., sum n_i]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: Fp8Layer,
        group: Group | None,
        gathers: bool,
        count: int,
        compiled: bool,
        *parameters: Tensor,
    ) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        rows = x.reshape(-1, x.shape[-1])
        tokens = rows.shape[0] * (group.size if group is not None and gathers else 1)
        ctx.narrow = tokens % FP8_MULTIPLE == 0
        """Whether the weight's gradient is an FP8 product too: the number of tokens must be a multiple of 16."""
        trained = any(ctx.needs_input_grad[6:])
        quantised = layer.quantise("input", rows, transposed=trained and ctx.narrow and not gathers, compiled=compiled)
        values = quantised.values
        if group is not None and gathers:
            values, handle = _gather(values, group)
            handle.wait()
        weight = layer.weight(_matrix(weights), compiled=compiled)
        bias = concatenated_bias(biases)
        y = fp8.product(values, weight.values, quantised.inverse, weight.inverse, x.dtype, bias, fast=True)
        kept = rows if not ctx.narrow else quantised.values if gathers else quantised.transposed
        kept = kept if trained else None  # a frozen layer's backward does not need its input
        ctx.layer, ctx.group, ctx.gathers, ctx.count, ctx.compiled, ctx.shape = (
            layer,
            group,
            gathers,
            count,
            compiled,
            x.shape,
        )
        ctx.targets = [target_of(parameter) for parameter in parameters]
        by_columns = weight.transposed if layer.fp8.keeps_weights else None  # else backward casts the weights again
        ctx.save_for_backward(kept, quantised.inverse, by_columns, weight.inverse, *parameters)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        group: Group | None = ctx.group
        kept, x_inverse, weight, weight_inverse, *parameters = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        needs_input, needs_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[6:])
        gathering, reducing = CommunicationHandle(), CommunicationHandle()
        if group is not None and ctx.gathers and needs_weights:
            kept, gathering = _gather(kept.contiguous(), group)
        quantised = ctx.layer.quantise("gradient", grad, transposed=ctx.narrow and needs_weights, compiled=ctx.compiled)
        grad_x = None
        if needs_input:
            if weight is None:
                weight = ctx.layer.weight(_matrix(tuple(parameters[: ctx.count])), compiled=ctx.compiled).transposed
            grad_x = whole = fp8.product(quantised.values, weight, quantised.inverse, weight_inverse, grad.dtype)
            if group is not None and ctx.gathers:
                grad_x = whole.new_empty((whole.shape[0] // group.size, whole.shape[1]))
                reducing = reduce_scatter(grad_x, whole, group)
            elif group is not None:
                reducing = all_reduce(whole, group)
        gathering.wait()
        found: list[Tensor | None] = [None] * len(parameters)
        if needs_weights:
            by_columns = fp8.transpose(kept) if ctx.narrow and ctx.gathers else kept
            found = _parameter_gradients(ctx, grad, quantised, by_columns, x_inverse, parameters)
        reducing.wait()
        return None if grad_x is None else grad_x.view(ctx.shape), None, None, None, None, None, *found


def _parameter_gradients(
    ctx: Any, grad: Tensor, quantised: fp8.Quantised, x: Tensor, x_inverse: Tensor, parameters: list[Tensor]
) -> list[Tensor | None]:
    """As in `mpu.linear`. x: the input in FP8, transposed [k, m], if `ctx.narrow`; else the layer's input [m, k]."""
    sizes = [weight.shape[0] for weight in parameters[: ctx.count]]
    parts = grad.split(sizes, dim=-1)
    writes: list[Write] = []
    if ctx.narrow:
        assert quantised.transposed is not None
        pieces = quantised.transposed.split(sizes)
        writes += [partial(_narrow_gradient, piece, x, quantised.inverse, x_inverse) for piece in pieces]
    else:
        writes += [partial(linear.add_weight_gradient, part, x) for part in parts]
    found: list[Tensor | None] = []
    for i, parameter in enumerate(parameters):
        if not ctx.needs_input_grad[6 + i]:
            found.append(None)
            continue
        write = writes[i] if i < ctx.count else _bias_gradient(parts[i - ctx.count])
        found.append(route_gradient(parameter, ctx.targets[i], write))
    return found


def _narrow_gradient(grad: Tensor, x: Tensor, grad_inverse: Tensor, x_inverse: Tensor, into: Tensor, add: bool) -> None:
    fp8.add_weight_gradient(grad, x, grad_inverse, x_inverse, into, add)


def runs_fp8() -> bool:
    """Whether FP8 layers multiply in FP8 now: only while autograd records.

    Evaluation, a checkpoint's probe and generation multiply in the run's compute dtype. They do not change the history,
    and their results do not depend on whether the run trains in FP8.
    """
    return torch.is_grad_enabled()


def fp8_linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    layer: Fp8Layer,
    group: Group | None,
    sequence_parallel: bool,
) -> Tensor:
    """x [s(/t), b, k], weights [n_i, k], biases [n_i] (one each, or none) -> [s, b, sum n_i] of x's dtype, in FP8.

    group: the tp group of a column-parallel layer, which communicates as `mpu.linear.column_parallel_linear` does.
    None: only amax values are communicated (`mpu.fp8`).
    """
    gathers = group is not None and sequence_parallel and group.size > 1
    result: Tensor = _Fp8Linear.apply(x, layer, group, gathers, len(weights), runs_compiled(), *weights, *biases)
    return result
