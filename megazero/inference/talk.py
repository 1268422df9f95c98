"""A model that continues prompts and shows what it says: as it comes, numbered, or as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megazero.config.derive import max_positions
from megazero.config.schema import ModelConfig
from megazero.data.tokenizer import Tokenizer
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.prompts import encoded
from megazero.inference.sampling import Sampling
from megazero.inference.text import Stream

Prompt = tuple[str, list[int]]
"""Its text, and its ids with what begins them."""
Row = tuple[int, str, list[int]]
"""A continuation to be made: its number, which the draws depend on, and its prompt."""


@dataclass(frozen=True)
class Manner:
    """How prompts are continued.

    samples     continuations of each prompt
    batch_size  continuations that are computed at once
    stops       strings that end a continuation, and are not shown
    stop_ids    tokens that do
    prefix_id   token in front of every prompt
    eod_id      token that an empty prompt stands for
    as_json     a line of JSON for each continuation
    """

    sampling: Sampling
    max_new_tokens: int
    samples: int = 1
    batch_size: int = 16
    stops: Sequence[str] = ()
    stop_ids: frozenset[int] = frozenset()
    prefix_id: int | None = None
    eod_id: int | None = None
    as_json: bool = False


@dataclass
class Talk:
    """A model on the ranks of a pipeline, and what it has been asked so far. note: tells the person who reads along."""

    model: ModelConfig
    pipeline: Pipeline
    tokenizer: Tokenizer
    manner: Manner
    shows: bool
    """Whether this rank prints."""
    note: Callable[[str], None]
    asked: int = 0
    """Prompts so far: they number the draws."""
    warned: bool = False
    """Whether it was said that a text outgrows the context."""

    def read(self, prompts: Sequence[str]) -> list[Prompt]:
        """On rank 0. Raises DataError."""
        ids = encoded(prompts, self.tokenizer, self.model, first=self.manner.prefix_id, eod_id=self.manner.eod_id)
        return list(zip(prompts, ids, strict=True))

    def answer(self, prompts: Sequence[Prompt]) -> None:
        """Continue prompts, on every rank; the one that shows prints them."""
        count, most = self.manner.samples, self.manner.batch_size
        self._note_length(max((len(ids) for _, ids in prompts), default=0))
        rows = [((self.asked + i) * count + k, text, ids) for i, (text, ids) in enumerate(prompts) for k in range(count)]
        self.asked += len(prompts)
        began, tokens = time.perf_counter(), 0
        for start in range(0, len(rows), most):
            tokens += self._batch(rows[start : start + most], alone=len(rows) == 1)
        seconds = time.perf_counter() - began
        self.note(f"{tokens} tokens in {seconds:.2f} s, prompts included: {tokens / seconds:.1f} tokens/s")

    def _batch(self, rows: Sequence[Row], *, alone: bool) -> int:
        """The number of new tokens."""
        manner = self.manner
        streams = [Stream(self.tokenizer, ids, manner.stops) for _, _, ids in rows] if self.shows or manner.stops else []
        streaming = self.shows and alone and not manner.as_json

        def ends(row: int, token: int) -> bool:
            if token in manner.stop_ids:
                return True
            if not streams:
                return False
            _show(streams[row].push(token), streaming)
            return streams[row].stopped is not None

        new = generate(
            self.pipeline,
            [ids for _, _, ids in rows],
            manner.max_new_tokens,
            manner.sampling,
            ends=ends,
            vocabulary=self.tokenizer.vocab_size,
            numbers=[number for number, _, _ in rows],
        )
        if self.shows:
            for (number, prompt, _), ids, stream in zip(rows, new, streams, strict=True):
                _show(stream.finish(), streaming)
                if not streaming:
                    print(
                        self._record(prompt, ids, stream) if manner.as_json else f"=== {number + 1}: {prompt!r}\n{stream.text}", flush=True
                    )
            _show("\n", streaming)
        return sum(map(len, new))

    def _record(self, prompt: str, ids: list[int], stream: Stream) -> str:
        ended = "stop string" if stream.stopped is not None else "stop token" if ids[-1] in self.manner.stop_ids else "length"
        record: dict[str, Any] = {"prompt": prompt, "text": stream.text, "ids": ids, "ended": ended, "stop": stream.stopped}
        return json.dumps(record)

    def _note_length(self, longest: int) -> None:
        total = longest + self.manner.max_new_tokens
        learned = self.model.position_embedding == "learned"
        most = max_positions(self.model) if learned else self.model.seq_length
        if total <= most or self.warned:
            return
        self.warned = True
        fate = "the oldest leave the context, and every token takes a whole forward pass" if learned else "it was trained on shorter ones"
        self.note(f"up to {total} tokens, more than the model's {most}: beyond them {fate}")


def _show(piece: str, streaming: bool) -> None:
    if streaming and piece:
        print(piece, end="", flush=True)
