"""Tokens to text while they come: whole characters only, and up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.data.indexed import DataError
from megazero.data.tokenizer import Tokenizer

CONTEXT = 8
"""Tokens that are decoded again in front of a new one: how a token reads may depend on its neighbours (a leading space,
bytes of a character).
"""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of the tokens that follow `prompt`. What a later token may still change, bytes of an unfinished character,
    is held back.

    The pieces and the rest of `flush` are decode(prompt + tokens) without decode(prompt), as long as the prompt ends
    with a whole character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._ids = self._recent(list(prompt))
        self._shown = len(self._decode(self._ids))
        self._most = 4 * CONTEXT

    def push(self, token: int) -> str:
        """The text that is certain now."""
        self._ids.append(token)
        text = self._decode(self._ids)
        certain = len(text.rstrip(UNKNOWN))
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if certain == len(text) and len(self._ids) > self._most:
            self._ids = self._recent(self._ids)
            self._shown = len(self._decode(self._ids))
            self._most = 2 * len(self._ids) + 2 * CONTEXT
        return piece

    def _recent(self, ids: list[int]) -> list[int]:
        """The last tokens that begin with a character of their own: at least CONTEXT, all where none do. (LLaMA's
        decoder gives up a whole row of bytes for the first one that is missing.)
        """
        counts = range(CONTEXT, len(ids), max(1, len(ids) // (4 * CONTEXT)))
        return next((ids[-count:] for count in counts if not self._decode(ids[-count:]).startswith(UNKNOWN)), ids)

    def flush(self) -> str:
        """What was held back, where no token follows."""
        text = self._decode(self._ids)
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece


class Stream:
    """The text of one row, until it ends or holds one of the strings in `stops`, which may begin in one token and end
    in another.

    text     what has been given out: without the stop string and what came behind it
    stopped  the stop string that was found first; None: none
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._pieces, self._stops = Detokenizer(tokenizer, prompt), tuple(stops)
        self._held = ""
        self.text = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """What can be shown: text that cannot be the beginning of a stop string."""
        return self._take(self._pieces.push(token), last=False)

    def finish(self) -> str:
        """What was held back, once the row has ended."""
        return self._take(self._pieces.flush(), last=True)

    def _take(self, piece: str, *, last: bool) -> str:
        if self.stopped is not None:
            return ""
        self._held += piece
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            cut, self.stopped = min(found, key=lambda pair: pair[0])
        else:
            cut = len(self._held) - (0 if last else max(map(self._begun, self._stops), default=0))
        shown, self._held = self._held[:cut], self._held[cut:]
        self.text += shown
        return shown

    def _begun(self, stop: str) -> int:
        """Characters at the end of what is held that `stop` may begin with."""
        return next(
            (count for count in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:count])),
            0,
        )


class IdTokenizer:
    """Where there is no tokenizer: the text of tokens is their ids, with spaces between."""

    eod_id = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids with spaces or commas between them. Raises DataError for anything else."""
        words = text.replace(",", " ").split()
        wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
        if wrong is not None:
            raise DataError(f"{wrong!r} is no token id; with --ids prompts are ids with spaces or commas between")
        return [int(word) for word in words]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))
