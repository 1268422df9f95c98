"""Causal attention by torch's FlexAttention: one flash-like kernel of torch.compile with ALiBi and documents.

s sequence, b micro-batch, n heads, g key-value heads, r = n/g, d head dim. As in fused_ops/compiled.py, one pure
function is compiled, from the projection to the context, so that the compiler can fuse the split of the projection and
the join of its gradients. It is compiled once per shape in a process, for all layers.

The blocks of 128 x 128 scores that are needed follow from the documents and the window alone: what a query sees is a
run of positions, so a query block sees the blocks right before it. (The end of a chunk is one of a document.) torch's
create_block_mask would evaluate all s x s pairs and sort them for every micro-batch. A second function that is compiled
makes them. They must not be computed in the first: the compiler would choose their strides, and torch's kernel reads
them as if they were contiguous. On an H100 with torch 2.11 it read beyond their end wherever no gradient was asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fused_ops.attention.declared import declared_flash
from fused_ops.attention.reach import EVERYTHING, Reach, with_chunks
from fused_ops.attention.sdpa import heads_of, joined
from fused_ops.compiled import compiled_for

BLOCK = 128
Blocks = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""For query blocks: numbers and indices of the key blocks that are partly visible, then of those fully visible. For key
blocks the same of query blocks. Numbers are int32 [b or 1, 1, s/128]. Indices have one more axis of length s/128, of
which the first entries count, as many as the number says.
"""

CONTIGUOUS = "BLOCKS_ARE_CONTIGUOUS"


def kernel_options(length: int, *, documents: bool, window: bool = False) -> tuple[str, ...]:
    """Options of torch's kernel that hold for `visible_blocks`.

    CONTIGUOUS: each list counts up, so the kernel reads only its first entry. On an H100 forward is 7% faster with it,
    and backward 3%. It does not hold for several documents or a window: the partly visible blocks are the first that is
    seen and the diagonal one. Where blocks do not fill the sequence, the query blocks of a key block that are partly
    visible are the first and the last.

    ROWS_GUARANTEED_SAFE (no row's maximum is ever -inf) holds for one document as well, and gained nothing there.
    """
    return (CONTIGUOUS,) if not documents and not window and length % BLOCK == 0 else ()


def visible_blocks(length: int, documents: Tensor | None, device: torch.device, window: int | None = None) -> Blocks:
    """The blocks that are visible by causality, documents (int64 [b, s], equal numbers adjacent) and window.

    Key block j < i is visible to query block i if the document of j's last position is that of i's first. It is fully
    visible if the document of j's first position is that of i's last. With a window j's last position has to be in
    reach of i's first too, and for full visibility j's first position in reach of i's last. A block that the sequence
    does not fill is never fully visible, as in torch. Does not wait for the device.
    """
    blocks = -(-length // BLOCK)
    number = torch.arange(blocks, device=device)
    if documents is None:
        first = last = number.new_zeros((1, blocks))
    else:
        first = documents[:, ::BLOCK]
        ends = documents[:, BLOCK - 1 :: BLOCK]
        last = ends if length % BLOCK == 0 else torch.cat([ends, documents[:, -1:]], dim=1)
    before = number[:, None] > number
    seen = before & (last[:, None, :] == first[:, :, None])
    whole = before & (first[:, None, :] == last[:, :, None]) & ((number[:, None] + 1) * BLOCK <= length)
    if window is not None:
        seen = seen & ((number[:, None] - number - 1) * BLOCK + 1 < window)
        whole = whole & ((number[:, None] - number + 1) * BLOCK - 1 < window)
    slot, own = number, number[:, None]
    keys, whole_keys = seen.sum(2, keepdim=True), whole.sum(2, keepdim=True)
    queries, whole_queries = (blocks_of.sum(1).unsqueeze(2) for blocks_of in (seen, whole))
    part_keys, part_queries = keys - whole_keys, queries - whole_queries
    lists = (
        (part_keys + 1, torch.where(slot < part_keys, own - keys + slot, own)),
        (whole_keys, own - whole_keys + slot),
        (part_queries + 1, torch.where(slot > 0, own + whole_queries + slot, own)),
        (whole_queries, (own + 1 + slot).expand(len(first), blocks, blocks)),
    )
    counts = [_contiguous(count, blocks) for count, _ in lists]
    indices = [_contiguous(index.clamp(0, blocks - 1), blocks, blocks) for _, index in lists]
    return counts[0], indices[0], counts[1], indices[1], counts[2], indices[2], counts[3], indices[3]


def _contiguous(values: Tensor, *shape: int) -> Tensor:
    """Values as int32 [b or 1, 1, *shape] whose strides are the contiguous ones, that of the axis of length 1 too."""
    return values.to(torch.int32).reshape(-1).view(-1, 1, *shape)


@cache
def causal_blocks(length: int, device: torch.device, window: int | None = None) -> Blocks:
    """`visible_blocks` of one document, cached for all layers and micro-batches."""
    return visible_blocks(length, None, device, window)


def flex_body(
    mixed: Tensor,
    groups: int,
    repeats: int,
    head_dim: int,
    scale: float,
    slopes: Tensor | None,
    documents: Tensor | None,
    blocks: Blocks,
    options: tuple[str, ...] = (),
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """The function that is compiled.

    blocks   `visible_blocks` of `documents` and `window`, inputs of what is compiled
    options  of torch's kernel, which are set
    """
    from torch.nn.attention.flex_attention import (
        BlockMask,
        flex_attention,
    )  # this imports the compiler, which takes a second and 70 MB

    length = mixed.shape[0]
    query, key, value = heads_of(mixed, groups, repeats, head_dim)

    def scored(score: Tensor, sample: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            # Relative to the query's position: the softmax is the same, and the bias of near keys is small.
            score = score + slopes[head] * (k - q)
        return score

    def within(sample: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= k
        if window is not None:
            seen = seen & (q - k < window)
        if documents is not None:
            seen = seen & (documents[sample, q] == documents[sample, k])
        return seen

    chosen: Any = dict.fromkeys(options, True)
    mask = BlockMask((length, length), *blocks, (BLOCK, BLOCK), within)
    bias = None if slopes is None and cap is None else scored
    context: Any = flex_attention(
        query,
        key,
        value,
        score_mod=bias,
        block_mask=mask,
        scale=scale,
        enable_gqa=repeats > 1,
        kernel_options=chosen,
    )
    return joined(context)


def flex_attention(
    mixed: Tensor,
    groups: int,
    repeats: int,
    head_dim: int,
    *,
    scale: float,
    slopes: Tensor | None,
    documents: Tensor | None,
    reach: Reach = EVERYTHING,
    cap: float | None = None,
) -> Tensor:
    """As `fused_ops.attention.causal_attention`, on CUDA, for any s and head dims of 16 or more.

    The first call with a shape compiles.
    """
    if mixed.is_meta:
        return joined(declared_flash(*heads_of(mixed, groups, repeats, head_dim), reach))
    length, window = mixed.shape[0], reach.window
    documents = with_chunks(documents, reach.chunk, mixed)
    if documents is None:
        blocks = causal_blocks(length, mixed.device, window)
    else:
        with torch.no_grad():  # one compiled program, whether a gradient is recorded or not
            compiled_blocks = compiled_for(visible_blocks, documents.shape, mixed.device, window)
            blocks = compiled_blocks(length, documents, mixed.device, window)
    options = kernel_options(length, documents=documents is not None, window=window is not None)
    shape = mixed.shape, mixed.dtype, mixed.device, groups, repeats, head_dim, scale
    compiled = compiled_for(flex_body, *shape, slopes is None, documents is None, window, cap)
    result: Tensor = compiled(mixed, groups, repeats, head_dim, scale, slopes, documents, blocks, options, window, cap)
    return result
