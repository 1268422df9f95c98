"""Generation: a model continues rows of tokens, in one process or over tensor and pipeline ranks.

Prompts run through the model once, as in training. Then each step computes one token of every row with the key-value
cache. In two cases the whole context runs for every token instead. Under sequence parallelism a single token cannot be
divided over tp ranks. When a row reaches the end of a table of learned positions, its oldest tokens leave the context,
and all others change their position. Contexts are padded on the right, which has no effect, because attention is
causal.

b rows, s sequence, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.config.derive import max_positions
from megazero.config.layers.kinds import rotary_sets
from megazero.inference.cache import KeyValueCache
from megazero.inference.given import new_tokens, sampling_given, token_ids
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import NOT_FINITE, Row, Sampling, choose
from megazero.mpu.collectives import broadcast

PADDING = 64
"""Contexts are padded to a multiple of this, so that there are few lengths: the CPU's matrix library compiles and keeps
kernels for each, 4 MB per block and length.
"""
TOGETHER = 1 << 13
"""The most tokens of prompts that run through the model at once, which limits the memory of activations."""

Ends = Callable[[int, int], bool]


def never_ends(row: int, token: int) -> bool:
    """The default `ends` of `generate`: no token ends a row."""
    return False


def generate(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    ends: Ends = never_ends,
    vocabulary: int | None = None,
    numbers: Sequence[int] | None = None,
    cached: bool = True,
) -> list[list[int]]:
    """Return the new tokens of every prompt, the same on every rank. All ranks make the same call.

    prompts     ids, at least one for each prompt. With learned positions the model sees only the last tokens, as many
                as its table has rows
    ends        called on every rank as ends(row, token), once for each new token: whether the row ends with it. It must
                return the same on all ranks
    vocabulary  only ids below it are chosen, since a model may have more rows than its tokenizer has tokens; None: all
    numbers     for each row the number that determines its random draws; None: its index
    cached      False: run the whole context for every token

    Communicates for each token: a broadcast over pp of each chunk's output and of the chosen ids, and the messages of
    the layers over tp. Raises ValueError for an empty prompt, an id outside the model's vocabulary or a negative
    `max_new_tokens`, TypeError for what is neither ids nor a number, and FloatingPointError, on every rank, if logits
    are not finite.
    """
    size = pipeline.stages[0].layout.model.vocab_size
    assert size is not None
    max_new_tokens, sampling = new_tokens(max_new_tokens), sampling_given(sampling)
    given = [token_ids(f"prompt {number}", prompt, size) for number, prompt in enumerate(prompts)]
    numbers = range(len(given)) if numbers is None else numbers
    rows = [
        _Row(slot, number, prompt, len(prompt))
        for slot, (number, prompt) in enumerate(zip(numbers, given, strict=True))
    ]
    with pipeline.evaluating():
        feed = _Feed(pipeline, rows, cached=cached and not pipeline.shards_the_sequence)
        active = rows if max_new_tokens else []
        while active:
            chosen = _choose(pipeline, feed.logits(active), active, sampling, vocabulary)
            for row, token in zip(active, chosen, strict=True):
                row.ids.append(token)
                row.ended = ends(row.slot, token) or row.step == max_new_tokens
            active = [row for row in active if not row.ended]
    return [row.ids[row.prompt :] for row in rows]


@dataclass
class _Row:
    """ids: the prompt and the new tokens. prompt: the prompt's length. slot: the row's slot in the cache. number:
    determines the row's draws.
    """

    slot: int
    number: int
    ids: list[int]
    prompt: int
    ended: bool = False

    @property
    def step(self) -> int:
        return len(self.ids) - self.prompt


def _choose(
    pipeline: Pipeline, logits: Tensor | None, rows: Sequence[_Row], sampling: Sampling, vocabulary: int | None
) -> list[int]:
    """The next token of each row. Ranks with the head have equal logits and choose equally; they broadcast over pp."""
    grid = pipeline.grid
    chosen = torch.full((len(rows),), -1, dtype=torch.int64, device=grid.device)
    if logits is not None:
        # With pp > 1 the error is raised below, on all ranks: if one alone raised, the others would wait for ever.
        with nullcontext() if grid.pp.size == 1 else suppress(FloatingPointError):
            taken = choose(logits[:, :vocabulary], [Row(row.ids, row.number, row.step) for row in rows], sampling)
            if grid.pp.size == 1:
                return taken
            chosen.copy_(torch.tensor(taken))
    broadcast(chosen, grid.pp, pipeline.chunk_map.last_stage).wait()
    found = chosen.tolist()
    if min(found) < 0:
        raise FloatingPointError(NOT_FINITE)
    return found


class _Feed:
    """The model's inputs for each step: first the prompts, then single tokens with the cache, or whole contexts."""

    def __init__(self, pipeline: Pipeline, rows: Sequence[_Row], *, cached: bool) -> None:
        layout = pipeline.stages[0].layout
        self.pipeline, self.device = pipeline, pipeline.grid.device
        self.window = max_positions(layout.model) if layout.model.position_embedding == "learned" else None
        # Sequence parallelism divides a context equally over tp ranks.
        self.multiple = layout.tp.size if pipeline.shards_the_sequence else 1
        if self.window is not None:
            self.window = max(self.window - self.window % self.multiple, self.multiple)
        # Under longrope all keys of a row that becomes longer than those of the first training turn anew.
        self.switches = {
            settings.scaling.original(0) + 1
            for settings in rotary_sets(layout.model).values()
            if settings.scaling is not None and settings.scaling.kind == "longrope"
        }
        self.cache: KeyValueCache | None = None
        if cached and rows and self._within_window(rows):
            self.cache = KeyValueCache(pipeline.stages, len(rows), max(len(row.ids) for row in rows) + 1)

    def logits(self, rows: Sequence[_Row]) -> Tensor | None:
        """The logits after the last token of each row, [b, v]; None on ranks without the head."""
        if self.cache is not None and not self._within_window(rows):
            self.cache = None
        if self.cache is None:
            return self._contexts([row.ids for row in rows], None)
        if rows[0].step == 0:
            return self._prompts(rows, self.cache)
        again = [row for row in rows if len(row.ids) in self.switches]
        if not again:
            return self._tokens(rows, self.cache)
        others = [row for row in rows if len(row.ids) not in self.switches]
        parts = [self._contexts([row.ids for row in again], self.cache, [row.slot for row in again])]
        parts += [self._tokens(others, self.cache)] if others else []
        order = {row.slot: place for place, row in enumerate(again + others)}
        logits = [part for part in parts if part is not None]
        return torch.cat(logits)[self._ids([order[row.slot] for row in rows])] if logits else None

    def _within_window(self, rows: Sequence[_Row]) -> bool:
        return self.window is None or max(len(row.ids) for row in rows) <= self.window

    def _prompts(self, rows: Sequence[_Row], cache: KeyValueCache) -> Tensor | None:
        """Run the prompts; equal prompts run once, and their keys and values are copied."""
        first = {tuple(row.ids): row.slot for row in reversed(rows)}
        own = [row for row in rows if first[tuple(row.ids)] == row.slot]
        logits = self._contexts([row.ids for row in own], cache, [row.slot for row in own])
        if len(own) < len(rows):
            source = self._ids([first[tuple(row.ids)] for row in rows])
            cache.copy(source, self._ids([row.slot for row in rows]))
            if logits is not None:
                places = {row.slot: place for place, row in enumerate(own)}
                logits = logits[self._ids([places[first[tuple(row.ids)]] for row in rows])]
        return logits

    def _tokens(self, rows: Sequence[_Row], cache: KeyValueCache) -> Tensor | None:
        packed = self._ids([[row.slot, len(row.ids) - 1, row.ids[-1]] for row in rows]).t().contiguous()
        past = cache.continuing(packed[0], packed[1], 1, max(len(row.ids) for row in rows))
        lengths = [len(row.ids) for row in rows]
        return self.pipeline.logits(packed[2].unsqueeze(1), torch.zeros_like(packed[0]), past, lengths)

    def _contexts(
        self, contexts: Sequence[Sequence[int]], cache: KeyValueCache | None, slots: Sequence[int] = ()
    ) -> Tensor | None:
        """Run whole contexts in groups, each padded to one length."""
        parts = []
        for group in _groups([self._padded(len(context)) for context in contexts]):
            length = max(self._padded(len(contexts[i])) for i in group)
            shown = [list(contexts[i][-length:]) for i in group]
            tokens = self._ids([context + [0] * (length - len(context)) for context in shown])
            lengths = self._ids([len(context) for context in shown])
            past = None if cache is None else cache.beginning(self._ids([slots[i] for i in group]), length, lengths)
            parts.append(self.pipeline.logits(tokens, lengths - 1, past, [len(context) for context in shown]))
        found = [part for part in parts if part is not None]
        return torch.cat(found) if len(found) > 1 else found[0] if found else None

    def _padded(self, length: int) -> int:
        """The length that a context is padded to: a power of two, a multiple of PADDING, or at most the window."""
        step = math.lcm(self.multiple, PADDING if length > PADDING // 2 else max(8, 1 << (length - 1).bit_length()))
        padded = -(-length // step) * step
        return padded if self.window is None else min(padded, self.window)

    def _ids(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive rows in groups of at least one; a group has at most TOGETHER tokens, padding included."""
    group: list[int] = []
    longest = 0
    for row, length in enumerate(lengths):
        if group and (len(group) + 1) * max(longest, length) > TOGETHER:
            yield group
            group, longest = [], 0
        group.append(row)
        longest = max(longest, length)
    if group:
        yield group
