"""What the files beside a tokenizer's own say of its tokens: those that were added, and the one that ends documents.

`transformers` writes them into tokenizer_config.json, special_tokens_map.json and added_tokens.json. tokenizer.model
and vocab.json hold no added tokens at all, and no file but these says which token ends a document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from megazero.data.indexed import DataError
from megazero.data.special import named_tokens, token_text
from megazero.system.reading import BOUNDS, raised_as, read_object, shown

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Keys of further special tokens, each a list."""


class Base(Protocol):
    """A tokenizer to which tokens were added."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int | None: ...

    def pieces(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class FolderTokens:
    """The tokens of a folder.

    added    token -> id, of the tokens that were added to a tokenizer
    special  those that stand for no text
    named    name (bos_token, eos_token) -> token
    legacy   whether sentencepiece puts its blank also before text behind an added token, as `transformers` once did
    """

    added: Mapping[str, int]
    special: frozenset[str]
    named: Mapping[str, str]
    legacy: bool = False

    @property
    def end(self) -> str | None:
        """The token that ends a document."""
        return self.named.get("eos_token")


def read_folder_tokens(folder: Path) -> FolderTokens:
    """What the folder's files say. Raises DataError for files that hold something else."""
    config, special_map, told = (_object(folder / name) for name in (CONFIG, SPECIAL_MAP, ADDED))
    decoder = config.get("added_tokens_decoder")
    records: dict[str, Any] = decoder if isinstance(decoder, dict) else {}
    added: dict[str, Any] = {
        text: number for number, record in records.items() if (text := token_text(record)) is not None
    }
    added = {token: _id(number, token, folder / CONFIG) for token, number in added.items()}
    added |= {token: _id(number, token, folder / ADDED) for token, number in told.items()}
    named = named_tokens(config, special_map)
    special = {*named.values(), *_listed(config), *_listed(special_map)}
    marked = [record for record in records.values() if isinstance(record, dict) and record.get("special")]
    special |= set(filter(None, map(token_text, marked)))
    return FolderTokens(added, frozenset(special), named, config.get("legacy") is True)


def _object(path: Path) -> dict[str, Any]:
    with raised_as(DataError):
        return read_object(path, BOUNDS.tokenizer) if path.is_file() else {}


def _listed(record: Mapping[str, Any]) -> Iterator[str]:
    for key in LISTS:
        entries = record.get(key)
        if isinstance(entries, list):
            yield from filter(None, map(token_text, entries))


def _id(number: object, token: str, path: Path) -> int:
    """The id of a token, which is a number or its digits. Raises DataError."""
    if isinstance(number, str) and re.fullmatch("[0-9]{1,9}", number):
        number = int(number)
    if type(number) is not int or not 0 <= number < BOUNDS.vocabulary:
        limits = f"ids are from 0 to below {BOUNDS.vocabulary:,}"
        raise DataError(f"{path} gives {shown(token)} the id {shown(number)}; {limits}")
    return number


class CompletedTokenizer:
    """A tokenizer with the tokens that were added to it, as `transformers` makes it of the same folder.

    A text that spells an added token which is no special one holds that token. One that spells a special token is
    text, as for every tokenizer here. An added token has its id, whatever the tokenizer itself has there.

    inside: as `encode`, for text behind an added token.
    """

    def __init__(self, base: Base, tokens: FolderTokens, inside: Callable[[str], list[int]]) -> None:
        self._base, self._inside = base, self._as_at_first if tokens.legacy else inside
        pieces = base.pieces()
        self._added = {token: number for token, number in tokens.added.items() if pieces.get(token) != number}
        self._text_of = {number: token for token, number in self._added.items()}
        if len(self._text_of) < len(self._added):
            raise DataError(f"{ADDED} gives {len(self._added)} tokens {len(self._text_of)} different ids")
        self.vocab_size = max(base.vocab_size, *(number + 1 for number in self._added.values()), 0)
        end = None if tokens.end is None else self._added.get(tokens.end, pieces.get(tokens.end))
        self.eod_id = base.eod_id if end is None else end
        plain = sorted((token for token in self._added if token and token not in tokens.special), key=len, reverse=True)
        self._parts = re.compile(f"({'|'.join(map(re.escape, plain))})" if plain else "(?!)")

    def pieces(self) -> Mapping[str, int]:
        kept = {token: number for token, number in self._base.pieces().items() if number not in self._text_of}
        return kept | self._added

    def encode(self, text: str) -> list[int]:
        parts = self._parts.split(text)
        ids = self._base.encode(parts[0])
        for token, part in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(self._added[token])
            ids += self._inside(part) if part else []
        return ids

    def decode(self, ids: list[int]) -> str:
        wrong = next((number for number in ids if number >= self.vocab_size), None)
        if wrong is not None:
            raise DataError(f"token id {wrong} is not in the tokenizer's vocabulary of {self.vocab_size}")
        text, first = "", True
        for is_added, run in groupby(ids, self._text_of.__contains__):
            numbers = [*run]
            if is_added:
                text += "".join(self._text_of[number] for number in numbers)
            else:
                text += self._base.decode(numbers) if first else self._behind(numbers)
            first = False
        return text

    def _behind(self, ids: list[int]) -> str:
        """The text of ids behind other text, where a blank at their beginning counts."""
        before, start = self._anchor
        return self._base.decode([*before, *ids])[len(start) :]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """(ids of a word, the word)."""
        ids = self._base.encode("a")
        return ids, self._base.decode(ids)

    def _as_at_first(self, text: str) -> list[int]:
        """The ids of a text with the blank that the tokenizer puts before any: it stands for one that is there."""
        return self._base.encode(text.removeprefix(self._blank))

    @cached_property
    def _blank(self) -> str:
        """The blank that the tokenizer itself puts before a text, if it does."""
        first = self._anchor[0][0]
        piece = next((piece for piece, number in self._base.pieces().items() if number == first), "")
        return " " if piece.startswith("▁") else ""


def completed(base: Base, folder: Path, inside: Callable[[str], list[int]]) -> Base:
    """The tokenizer with what the folder's files say of it: itself, where they say nothing. inside: as `encode`, for
    text behind an added token. Raises DataError.
    """
    tokens = read_folder_tokens(folder)
    return CompletedTokenizer(base, tokens, inside) if tokens.added or tokens.end is not None else base
