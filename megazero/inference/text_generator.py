"""Continuing prompts and printing the texts: token by token, numbered, or as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megazero.config.derive import max_positions
from megazero.config.schema import ModelConfig
from megazero.data.chat import Message
from megazero.data.indexed import DataError
from megazero.data.tokenizer import Tokenizer
from megazero.inference.chat_tokens import ChatTokens, special_tokens_in
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.prompts import check_ids, encoded, shorten
from megazero.inference.sampling import Sampling
from megazero.inference.terminal import escape_control
from megazero.inference.text import Stream
from megazero.system.words import counted

Prompt = tuple[str, list[int]]
"""A prompt: its text, and its ids with those put in front."""
Row = tuple[int, str, list[int]]
"""A continuation to generate: its number, which determines its draws, the prompt's text, and the prompt's ids."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class GenerationOptions:
    """How prompts are continued.

    sampling        how a token is chosen
    max_new_tokens  the most tokens of a continuation
    samples         continuations of each prompt
    batch_size      continuations that are computed at once
    stops           strings that end a continuation, and are not shown
    stop_ids        tokens that end a continuation
    prefix          tokens in front of every prompt
    eod_id          token that an empty prompt stands for
    as_json         print a line of JSON for each continuation
    max_length      the most tokens of a prompt and its continuation, as the model's files say; None: any number
    """

    sampling: Sampling
    max_new_tokens: int
    samples: int = 1
    batch_size: int = 16
    stops: Sequence[str] = ()
    stop_ids: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()
    eod_id: int | None = None
    as_json: bool = False
    max_length: int | None = None

    def most(self, prompt: Sequence[int]) -> int:
        """The most tokens of a continuation of these ids."""
        room = self.max_new_tokens if self.max_length is None else self.max_length - len(prompt)
        return min(self.max_new_tokens, room)


@dataclass
class TextGenerator:
    """A model on the ranks of a pipeline, with the options of generation. note: prints a line for the user."""

    model: ModelConfig
    pipeline: Pipeline
    tokenizer: Tokenizer
    options: GenerationOptions
    shows: bool
    """Whether this rank prints."""
    note: Callable[[str], None]
    asked: int = 0
    """Prompts so far. Their numbers determine the draws."""
    warned: bool = False
    """Whether the warning about texts longer than the context was printed."""
    stopped: Callable[[], bool] = _never
    """Called on all ranks after every token: whether all continuations under way end with it."""

    def read(self, prompts: Sequence[str]) -> list[Prompt]:
        """Encode prompts. Called on rank 0. Raises DataError for one that the model cannot take."""
        ids = encoded(prompts, self.tokenizer, self.model, first=self.options.prefix, eod_id=self.options.eod_id)
        for text, row in zip(prompts, ids, strict=True):
            self._check_length(f"the prompt {shorten(text)}", row)
        self._note_specials(prompts, "; --chat writes a chat as the model knows it")
        return list(zip(prompts, ids, strict=True))

    def read_chats(self, chats: Sequence[Sequence[Message]]) -> list[Prompt]:
        """Encode conversations that the model is to answer. Called on rank 0; the tokenizer must be a `ChatTokens`.

        Raises DataError.
        """
        assert isinstance(self.tokenizer, ChatTokens)
        last = [str(chat[-1]["content"]) for chat in chats]
        found = [
            check_ids(f"the conversation up to {shorten(text)}", self.tokenizer.question(chat), self.model)
            for text, chat in zip(last, chats, strict=True)
        ]
        for text, row in zip(last, found, strict=True):
            self._check_length(f"the conversation up to {shorten(text)}", row)
        self._note_specials(last, "")
        return list(zip(last, found, strict=True))

    def take(self, sampling: Sampling) -> None:
        """Use this sampling from now on."""
        self.options = replace(self.options, sampling=sampling)

    def answer(self, prompts: Sequence[Prompt]) -> list[str]:
        """Continue prompts. A collective of all ranks. Only the rank that `shows` prints the texts and returns them."""
        count, most = self.options.samples, self.options.batch_size
        self._note_length(max((len(ids) + self.options.most(ids) for _, ids in prompts), default=0))
        rows = [
            ((self.asked + i) * count + k, text, ids) for i, (text, ids) in enumerate(prompts) for k in range(count)
        ]
        self.asked += len(prompts)
        began, tokens, cut = time.perf_counter(), 0, 0
        texts: list[str] = []
        for start in range(0, len(rows), most):
            count, unended, shown = self._batch(rows[start : start + most], alone=len(rows) == 1)
            tokens, cut, texts = tokens + count, cut + unended, texts + shown
        seconds = time.perf_counter() - began
        self.note(
            f"{counted(tokens, 'token')} in {seconds:.2f} s, prompts included: {tokens / seconds:.1f} "
            f"tokens/s{self._cut(cut, rows)}"
        )
        return texts

    def _check_length(self, what: str, ids: Sequence[int]) -> None:
        """Raises DataError for a prompt that leaves no room for a token."""
        if self.options.most(ids) < 1:
            raise DataError(
                f"{what} is {len(ids)} tokens, and the model's files say max_length {self.options.max_length}, which "
                "leaves none to add; --max-new-tokens N says how many"
            )

    def _cut(self, cut: int, rows: Sequence[Row]) -> str:
        """The remark that --max-new-tokens, or the model's max_length, has cut off texts; empty if it has not."""
        options = self.options
        whole = all(options.most(ids) == options.max_new_tokens for _, _, ids in rows)
        most = f"--max-new-tokens {options.max_new_tokens}"
        limit = most if whole else f"the model's max_length {options.max_length}"
        which = "" if len(rows) == 1 else f": {cut} of {len(rows)}"
        return f"; cut off by {limit}{which}" if cut else ""

    def _batch(self, rows: Sequence[Row], *, alone: bool) -> tuple[int, int, list[str]]:
        """(number of new tokens, number of rows cut off, texts); the last two are 0 and empty if nothing is shown."""
        options = self.options
        # An answer of a chat is decoded by itself, without the end of its prompt, as `transformers` does.
        before = [[] if isinstance(self.tokenizer, ChatTokens) else ids for _, _, ids in rows]
        streams = [Stream(self.tokenizer, ids, options.stops) for ids in before] if self.shows or options.stops else []
        streaming = self.shows and alone and not options.as_json
        left = [options.most(ids) for _, _, ids in rows]

        def ends(row: int, token: int) -> bool:
            left[row] -= 1
            stopped = self.stopped() or left[row] == 0
            if token in options.stop_ids:
                return True
            if not streams:
                return stopped
            _show(streams[row].push(token), streaming)
            return stopped or streams[row].stopped is not None

        new = generate(
            self.pipeline,
            [ids for _, _, ids in rows],
            options.max_new_tokens,
            options.sampling,
            ends=ends,
            vocabulary=self.tokenizer.vocab_size,
            numbers=[number for number, _, _ in rows],
        )
        if self.shows:
            for (number, prompt, given), ids, stream in zip(rows, new, streams, strict=True):
                _show(stream.finish(), streaming)
                if not streaming:
                    print(
                        self._record(prompt, given, ids, stream)
                        if options.as_json
                        else f"=== {number + 1}: {prompt!r}\n{escape_control(stream.text)}",
                        flush=True,
                    )
            _show("\n", streaming)
        if not self.shows:
            return sum(map(len, new)), 0, []
        cut = sum(
            self._ended(given, ids, stream) == "length"
            for (_, _, given), ids, stream in zip(rows, new, streams, strict=True)
        )
        return sum(map(len, new)), cut, [stream.text for stream in streams]

    def _note_specials(self, texts: Sequence[str], advice: str) -> None:
        for text in texts:
            if found := special_tokens_in(text, self.tokenizer):
                spells = f"{'the special token' if len(found) == 1 else 'special tokens'} {' '.join(found)}"
                self.note(f"warning: {shorten(text)} spells {spells}, which is plain text here{advice}")

    def _record(self, prompt: str, given: list[int], ids: list[int], stream: Stream) -> str:
        record: dict[str, Any] = {
            "prompt": prompt,
            "text": stream.text,
            "ids": ids,
            "ended": self._ended(given, ids, stream),
            "stop": stream.stopped,
        }
        return json.dumps(record)

    def _ended(self, given: list[int], ids: list[int], stream: Stream) -> str:
        """What ended the ids after the given ones."""
        length = "length" if len(ids) == self.options.most(given) else "interruption"
        return (
            "stop string"
            if stream.stopped is not None
            else "stop token"
            if ids[-1] in self.options.stop_ids
            else length
        )

    def _note_length(self, total: int) -> None:
        learned = self.model.position_embedding == "learned"
        most = max_positions(self.model) if learned else self.model.seq_length
        if total <= most or self.warned:
            return
        self.warned = True
        fate = (
            "the oldest leave the context, and every token takes a whole forward pass"
            if learned
            else "the model continues texts that are longer than those of its last training"
        )
        self.note(f"up to {total} tokens, more than the model's {most}: beyond {most} tokens {fate}")


def _show(piece: str, streaming: bool) -> None:
    if streaming and piece:
        print(escape_control(piece), end="", flush=True)
