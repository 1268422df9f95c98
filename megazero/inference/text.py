"""Text from tokens one by one: whole characters only, and up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.data.indexed import DataError
from megazero.data.tokenizer import Tokenizer

CONTEXT = 8
"""Earlier tokens that are decoded again together with a new one, because the text of a token may depend on them (a
leading space, bytes of a character).
"""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of the tokens that follow `prompt`, in pieces. Bytes of an unfinished character are kept for later.

    The pieces of `push` and the rest of `flush` together are decode(prompt + tokens) without decode(prompt), if the
    prompt ends with a whole character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._ids = self._recent(list(prompt))
        self._shown = len(self._decode(self._ids))
        self._most = 4 * CONTEXT

    def push(self, token: int) -> str:
        """Add a token; return the new text that later tokens cannot change."""
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
        """The fewest last tokens, at least CONTEXT, whose text does not begin within a character; else all tokens.

        (If the first of a row of byte tokens is missing, LLaMA's decoder decodes none of the row.)
        """
        counts = range(CONTEXT, len(ids), max(1, len(ids) // (4 * CONTEXT)))
        return next((ids[-count:] for count in counts if not self._decode(ids[-count:]).startswith(UNKNOWN)), ids)

    def flush(self) -> str:
        """Return the text that was kept back. Called after the last token."""
        text = self._decode(self._ids)
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece


class Stream:
    """The text of one row, up to its end or a stop string, which may begin in one token and end in another.

    text     the text that `push` and `finish` have returned: without the stop string and what follows it
    stopped  the stop string that was found first; None if there is none

    Raises ValueError for an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._pieces, self._stops = Detokenizer(tokenizer, prompt), tuple(stops)
        self._held = ""
        self.text = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Add a token; return the new text that cannot be the beginning of a stop string."""
        return self._take(self._pieces.push(token), last=False)

    def finish(self) -> str:
        """Return the text that was kept back. Called once the row has ended."""
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
        """The number of characters at the end of the kept text with which `stop` begins."""
        return next(
            (count for count in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:count])),
            0,
        )


class IdTokenizer:
    """A tokenizer for models without one: the text of tokens is their ids, separated by spaces."""

    eod_id = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """The ids in a text, separated by spaces or commas. Raises DataError for any other text."""
        words = text.replace(",", " ").split()
        wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
        if wrong is not None:
            raise DataError(f"{wrong!r} is no token id; with --ids prompts are ids with spaces or commas between")
        return [int(word) for word in words]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))
