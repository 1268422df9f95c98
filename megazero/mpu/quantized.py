"""Collectives that send blocks of int8 or int4, as ZeRO++ does (Wang et al. 2023, arXiv:2306.10209).

`fused_ops.quantise` has the format. Each part travels as one message of uint8, codes and scales together, and is
counted so. Sums are made of the dequantised parts in fp32 (fp64 of fp64), in the order of the group; what was quantised
is never added up as it is.

A part that is not finite arrives as NaN, on every rank that gets it. In a group of one nothing travels and nothing is
quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.quantise import dequantise, packed_bytes, quantise, sum_dequantised
from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.grid import Group

GATHERED_BITS = 8
"""Bits of what is gathered. It is not summed afterwards, so nothing averages its error."""


def all_gather_quantized(output: Tensor, piece: Tensor, group: Group) -> CommunicationHandle:
    """`collectives.all_gather` in blocks of int8: half of the bytes of 16-bit parameters.

    Each rank quantises its `piece` once, at the launch. `output` gets what the codes say on every rank, its own piece
    included: so it has the same bits everywhere. `piece` may be a view of this rank's part of `output`.
    """
    if group.handle is None:
        return collectives.all_gather(output, piece, group)
    assert output.numel() == group.size * piece.numel()
    packed = quantise(piece.detach().view(1, -1), GATHERED_BITS)
    whole = packed.new_empty((group.size, packed.numel()))
    arriving = collectives.all_gather(whole, packed, group)
    target = output.detach().view(group.size, -1)
    return CommunicationHandle(arriving, lambda: dequantise(whole, GATHERED_BITS, target))


def reduce_scatter_quantized(
    output: Tensor, whole: Tensor, group: Group, bits: int, error: Tensor | None = None
) -> CommunicationHandle:
    """`collectives.reduce_scatter` in blocks of `bits` (8 or 4): each part goes quantised to the rank that sums it.

    error  fp32 with as many elements as `whole`: what quantisation has lost of this rank's parts. It is added before
           they are quantised, and then has what is lost of them; where a block is not finite it stays as it was. So
           over many steps nothing is lost. If gradients come with a loss scale, so does what is kept: multiply it when
           the scale changes

    `whole` is read at the launch only. `output` may be a view of this rank's part of it.
    """
    if group.handle is None:
        return collectives.reduce_scatter(output, whole, group)
    assert whole.numel() == group.size * output.numel()
    kept = None if error is None else error.view(group.size, -1)
    packed = quantise(whole.detach().view(group.size, -1), bits, kept)
    received = torch.empty_like(packed)
    arriving = collectives.all_to_all(received, packed, group)
    return CommunicationHandle(arriving, lambda: sum_dequantised(received, bits, output.detach().view(-1)))


def all_reduce_quantized(tensor: Tensor, group: Group, bits: int, error: Tensor | None = None) -> CommunicationHandle:
    """Sum `tensor` over the group, in place: a quantised reduce-scatter, then a quantised all-gather of the sums.

    The number of its elements is a multiple of the group's size. The gather is launched by `wait`: ranks must wait for
    this, and for later collectives of the group, in the same order.

    bits, error  as in `reduce_scatter_quantized`; sums are gathered in int8
    """
    assert tensor.numel() % group.size == 0
    part = tensor.view(group.size, -1)[group.index]
    summed = reduce_scatter_quantized(part, tensor, group, bits, error)
    return CommunicationHandle(summed, lambda: all_gather_quantized(tensor, part, group).wait())


def gathered_bytes(numel: int, size: int) -> int:
    """Bytes that `all_gather_quantized` counts for an output of `numel` elements in a group of `size`."""
    return size * packed_bytes(numel // size, GATHERED_BITS) if size > 1 else 0


def scattered_bytes(numel: int, size: int, bits: int) -> int:
    """Bytes that `reduce_scatter_quantized` counts for `numel` elements in a group of `size`."""
    return size * packed_bytes(numel // size, bits) if size > 1 else 0
