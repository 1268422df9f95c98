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
from typing import Any, Protocol, cast

from megazero.data.indexed import DataError
from megazero.data.special import OF_CLASS, named_tokens, token_text
from megazero.system.reading import BOUNDS, raised_as, read_object, shown

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Keys of further special tokens, each a list."""
ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Keys of tokens with a role, which both files have."""


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
    config   the content of tokenizer_config.json
    flags    token -> lstrip, rstrip, single_word and normalized of an added token, where the folder says them
    """

    added: Mapping[str, int]
    special: frozenset[str]
    named: Mapping[str, str]
    config: Mapping[str, Any]
    flags: Mapping[str, Mapping[str, bool]]

    @property
    def end(self) -> str | None:
        """The token that ends a document."""
        return self.named.get("eos_token")

    @property
    def legacy(self) -> bool:
        """Whether sentencepiece puts its blank also before text behind an added token, as `transformers` once did."""
        return self.config.get("legacy") is True

    @property
    def prefix_space(self) -> bool | None:
        """Whether a blank is put before a text without one. None where the tokenizer's own file says it."""
        return bool(self.config.get("add_prefix_space")) if self.config.get("tokenizer_class") in OF_CLASS else None

    def frame(self) -> tuple[str | None, str | None]:
        """(the token before a text, the token behind it), which a tokenizer without tokenizer.json gets by name."""
        return (
            self.named.get("bos_token") if self.config.get("add_bos_token") is True else None,
            self.named.get("eos_token") if self.config.get("add_eos_token") is True else None,
        )


FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
"""What an added token takes of the text around it, and whether it stands in the text as normalised."""


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
    _require_tokens(config, folder / CONFIG)
    _require_tokens({} if "added_tokens_decoder" in config else special_map, folder / SPECIAL_MAP)
    named = named_tokens(config, special_map)
    special = {*named.values(), *_listed(config), *_listed(special_map)}
    marked = [record for record in records.values() if isinstance(record, dict) and record.get("special")]
    special |= set(filter(None, map(token_text, marked)))
    flags = {
        text: {name: record[name] for name in FLAGS if isinstance(record.get(name), bool)}
        for record in records.values()
        if isinstance(record, dict) and (text := token_text(record)) is not None
    }
    return FolderTokens(added, frozenset(special), named, config, flags)


def _object(path: Path) -> dict[str, Any]:
    with raised_as(DataError):
        return read_object(path, BOUNDS.tokenizer) if path.is_file() else {}


def _require_tokens(record: Mapping[str, Any], path: Path) -> None:
    """Refuse a token with a role that is none, as `transformers` does. Raises DataError."""
    for key in ROLES:
        value = record.get(key)
        if value is not None and token_text(value) is None:
            end = ", and then --eod-id says what ends a document" * (key == "eos_token")
            raise DataError(
                f"{path}: {key} {shown(value)} is no token: there must be a string, an object with a string as its "
                f"content, or null{end}"
            )


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

    inside  as `encode`, for text behind an added token
    begins  ids that `transformers` puts before a text; `encode` does not
    ends    ids that it puts behind one
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
        self._plain = sorted(
            (token for token in self._added if token and token not in tokens.special), key=len, reverse=True
        )
        self._parts = re.compile(
            "|".join(_pattern(token, tokens.flags.get(token, {})) for token in self._plain) or "(?!)"
        )
        self._before = " " if tokens.prefix_space else ""
        self.tokens = tokens
        before, behind = (self._added.get(token or "", pieces.get(token or "")) for token in tokens.frame())
        self.begins, self.ends = (() if number is None else (number,) for number in (before, behind))

    def pieces(self) -> Mapping[str, int]:
        kept = {token: number for token, number in self._base.pieces().items() if number not in self._text_of}
        return kept | self._added

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        start, encode = 0, cast(Callable[[str], list[int]], self._base.encode)
        for token in self._parts.finditer(text):
            ids += self._spaced(encode, text[start : token.start()])
            ids.append(self._added[self._plain[(token.lastindex or 0) - 1]])
            start, encode = token.end(), self._inside
        return ids + self._spaced(encode, text[start:])

    def _spaced(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """The ids of a part of a text."""
        return encode(text if text.startswith(" ") else self._before + text) if text else []

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


def _pattern(token: str, flags: Mapping[str, bool]) -> str:
    """A regular expression of an added token in a text, with the blanks that it takes. Its group is the token."""
    edge = flags.get("single_word", False)
    return (
        r"\s*" * flags.get("lstrip", False)
        + r"(?<!\w)" * edge
        + f"({re.escape(token)})"
        + r"(?!\w)" * edge
        + r"\s*" * flags.get("rstrip", False)
    )


def completed(base: Base, folder: Path, inside: Callable[[str], list[int]]) -> Base:
    """The tokenizer with what the folder's files say of it: itself, where they say nothing. inside: as `encode`, for
    text behind an added token. Raises DataError.
    """
    tokens = read_folder_tokens(folder)
    return CompletedTokenizer(base, tokens, inside) if tokens.added or tokens.named or tokens.config else base
