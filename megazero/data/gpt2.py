"""GPT-2's byte-level BPE (Radford et al. 2019) from vocab.json and merges.txt.

Text is cut into words by a regular expression; each word's UTF-8 bytes start as single-byte tokens, and the neighbouring pair that stands
earliest in the list of merges is joined until none is left. Words repeat, so their ids are remembered.
"""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from megazero.data.indexed import DataError

END_OF_TEXT = "<|endoftext|>"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
REMEMBERED = 1 << 18


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in vocab.json: itself where printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [value for value in range(256) if value not in printable]
    return [chr(value) if value in printable else chr(256 + hidden.index(value)) for value in range(256)]


class GPT2Tokenizer:
    """Reads the two files; raises DataError where they are damaged or do not belong together."""

    def __init__(self, vocab_file: Path, merges_file: Path) -> None:
        vocab = _read_vocab(vocab_file)
        symbols = byte_symbols()
        missing = [value for value, symbol in enumerate(symbols) if symbol not in vocab]
        if missing:
            raise DataError(f"{vocab_file} has no token for {len(missing)} of the 256 bytes, the first of them {missing[0]}")
        self.vocab_size = max(vocab.values()) + 1
        self.eod_id: int | None = vocab.get(END_OF_TEXT)
        self._first = [vocab[symbol] for symbol in symbols]
        self._merges = _read_merges(merges_file, vocab)
        byte_of = {symbol: value for value, symbol in enumerate(symbols)}
        self._bytes = {number: _token_bytes(token, byte_of) for token, number in vocab.items()}
        self._words = _pattern().findall
        self._remembered = lru_cache(maxsize=REMEMBERED)(self._join)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._words(text):
            ids += self._remembered(word) if len(word) <= 64 else self._join(word)
        return ids

    def decode(self, ids: list[int]) -> str:
        try:
            return b"".join([self._bytes[number] for number in ids]).decode("utf-8", errors="replace")
        except KeyError as error:
            raise DataError(f"token id {error.args[0]} is not in the tokenizer's vocabulary of {self.vocab_size}") from None

    def _join(self, word: str) -> tuple[int, ...]:
        """All places of the earliest pair are joined at once: a pair that a join makes stands later in the list than the join itself."""
        ids = [self._first[value] for value in word.encode("utf-8")]
        merges = self._merges
        last = (len(merges), -1)
        while len(ids) > 1:
            _, joined, pair = min((*merges.get(pair, last), pair) for pair in set(pairwise(ids)))
            if joined < 0:
                break
            ids = _replace(ids, pair, joined)
        return tuple(ids)


def _replace(ids: list[int], pair: tuple[int, int], joined: int) -> list[int]:
    out: list[int] = []
    place, end = 0, len(ids)
    while place < end:
        if place + 1 < end and ids[place] == pair[0] and ids[place + 1] == pair[1]:
            out.append(joined)
            place += 2
        else:
            out.append(ids[place])
            place += 1
    return out


def _pattern() -> Any:
    try:
        import regex
    except ImportError as error:
        raise ImportError("the gpt2 tokenizer needs the package regex: pip install regex") from error
    return regex.compile(WORDS)


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(vocab, dict) or not vocab or not all(type(number) is int and number >= 0 for number in vocab.values()):
        raise DataError(f"{path} is no table of tokens and ids")
    if len(set(vocab.values())) != len(vocab):
        raise DataError(f"{path} gives {len(vocab)} tokens {len(set(vocab.values()))} different ids")
    return vocab


def _read_merges(path: Path, vocab: dict[str, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(left id, right id) -> (rank, joined id)."""
    merges: dict[tuple[int, int], tuple[int, int]] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    start = 1 if lines[0].startswith("#version") else 0
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line.strip():
            continue
        halves = line.rstrip("\r").split(" ")
        unknown = [token for token in (*halves, "".join(halves)) if token not in vocab]
        if len(halves) != 2 or unknown:
            raise DataError(f"{path}, line {number}: {line!r} is no pair of tokens of the vocabulary")
        merges.setdefault((vocab[halves[0]], vocab[halves[1]]), (number, vocab["".join(halves)]))
    return {pair: (rank, joined) for rank, (pair, (_, joined)) in enumerate(merges.items())}


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """Added tokens may hold characters outside the byte alphabet: those stand for themselves."""
    if all(symbol in byte_of for symbol in token):
        return bytes(byte_of[symbol] for symbol in token)
    return token.encode("utf-8")
