"""Text from a model: greedy, temperature and top-k sampling, in one process or spread over tensor and pipeline ranks.

The whole context runs through the model for every token; no keys and values are kept. Right padding is harmless, attention being causal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megazero.batch import MicroBatch
from megazero.config.derive import max_positions
from megazero.model.stage import Stage
from megazero.mpu.chunks import ChunkMap
from megazero.mpu.collectives import broadcast
from megazero.mpu.grid import ProcessGrid, single_process_grid

PADDING = 64
"""Contexts have few lengths: for each, the CPU's matrix library compiles kernels and keeps them, 4 MB per block and length."""


def generate(
    stage: Stage,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 1234,
    eod_id: int | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """Continue `ids` with a model that lies whole in this process; see `generate_on_grid`."""
    grid = single_process_grid(ids.device)
    return generate_on_grid(
        [stage], grid, ids, max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, eod_id=eod_id, vocabulary=vocabulary
    )


def generate_on_grid(
    chunks: Sequence[Stage],
    grid: ProcessGrid,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 1234,
    eod_id: int | None = None,
    vocabulary: int | None = None,
    chunk_map: ChunkMap | None = None,
) -> Tensor:
    """Continue `ids`, int64 [b, n] with n >= 1, to [b, n + m], m <= max_new_tokens; every rank calls it and gets the same.

    chunks       this rank's virtual stages in order
    chunk_map    which chunks of the model they are; None: the stages take them in turns
    temperature  0: the likeliest token; else the logits are divided by it
    top_k        0: all tokens may be drawn; else the k likeliest
    vocabulary   only ids below it are drawn: a model may have more rows than its tokenizer has tokens; None: all
    eod_id       a row ends with this token (further places hold it too); generation stops when all rows have ended

    Communicates, per token: each chunk's output and the drawn ids, broadcast over pp, beside the layers' own messages.
    Raises ValueError for a negative temperature, top_k or number of tokens and for an empty context.
    """
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(f"ids have shape {tuple(ids.shape)}, not [b, n] with n >= 1")
    if temperature < 0 or top_k < 0 or max_new_tokens < 0:
        raise ValueError(f"temperature ({temperature}), top_k ({top_k}) and max_new_tokens ({max_new_tokens}) cannot be negative")
    layout = chunks[0].layout
    chunk_map = chunk_map or ChunkMap(grid.pp.size, len(chunks))
    # A shard of the sequence per tp rank under sequence parallelism: contexts are padded to a multiple of this.
    multiple = layout.tp.size if layout.sequence_parallel else 1
    positions = max_positions(layout.model) if layout.model.position_embedding == "learned" else layout.model.seq_length
    window = max(positions - positions % multiple, multiple)
    step = math.lcm(multiple, PADDING)
    generator = torch.Generator().manual_seed(seed)
    ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    with evaluating(chunks), torch.no_grad():
        for _ in range(max_new_tokens):
            context = _padded(ids[:, -window:], step, window)
            logits = _through_pipeline(chunks, chunk_map, grid, context, min(ids.shape[1], window) - 1)
            chosen = torch.zeros_like(ids[:, 0]) if logits is None else choose(logits[:, :vocabulary], temperature, top_k, generator)
            broadcast(chosen, grid.pp, chunk_map.last_stage).wait()
            if eod_id is not None:
                chosen = torch.where(ended, eod_id, chosen)
                ended |= chosen == eod_id
            ids = torch.cat([ids, chosen.unsqueeze(1)], dim=1)
            if ended.all():
                break
    return ids


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One token per row of logits [b, v] -> int64 [b]. Drawn on the host in float64, so that ranks with equal logits agree."""
    scores = logits.double().cpu()
    if temperature == 0:
        return scores.argmax(dim=-1).to(logits.device)
    scores /= temperature
    if 0 < top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores.masked_fill_(scores < least, float("-inf"))
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(1).to(logits.device)


@contextmanager
def evaluating(chunks: Sequence[Stage]) -> Iterator[None]:
    """The stages in evaluation mode (no dropout), and afterwards in the mode they were in."""
    before = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(chunks, before, strict=True):
            chunk.train(training)


def _padded(context: Tensor, multiple: int, window: int) -> MicroBatch:
    """The context on a multiple of so many positions, or on the whole window where that is less."""
    missing = min(-context.shape[1] % multiple, window - context.shape[1])
    tokens = torch.nn.functional.pad(context, (0, missing))
    return MicroBatch(tokens, tokens, None, torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device))


def _through_pipeline(chunks: Sequence[Stage], chunk_map: ChunkMap, grid: ProcessGrid, batch: MicroBatch, position: int) -> Tensor | None:
    """The logits [b, v] that follow `position`, on ranks that hold the head.

    Hidden states travel by broadcast over pp rather than by send and receive: the group's communicator exists already
    (a pair's would have to be made), and every rank goes through the same list of operations.
    """
    layout = chunks[0].layout
    b, s = batch.tokens.shape
    local = s // layout.tp.size if layout.sequence_parallel else s
    hidden = torch.zeros(local, b, layout.model.hidden_size, dtype=layout.dtype, device=batch.tokens.device)
    last = chunk_map.count - 1
    for number in range(last + 1):
        stage, own = chunk_map.holder(number)
        if stage == grid.pp.index and number == last:
            return chunks[own].logits(hidden, batch, position)[0]
        if stage == grid.pp.index:
            hidden = chunks[own](hidden, batch).contiguous()
        if number < last:
            broadcast(hidden, grid.pp, stage).wait()
    return None
