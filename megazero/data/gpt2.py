"""GPT-2's byte-level BPE (Radford et al. 2019) from vocab.json and merges.txt.

A regular expression splits text into words. The UTF-8 bytes of a word begin as single-byte tokens. Then the
neighbouring pair that comes first in the list of merges is joined, until no pair is left. Ids of words are cached.

Words are split by the package `regex`, as in the original; other libraries use other versions of Unicode.
`apply_merges` is the specification of the merges. The `tokenizers` library computes the same ten times as fast, but
only where the merges are in the order of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from megazero.data.indexed import DataError
from megazero.system.reading import BOUNDS, raised_as, read_json, read_text, shown

END_OF_TEXT = "<|endoftext|>"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
REMEMBERED = 1 << 18
NONE = -1
"""No token."""
Merges = Mapping[tuple[int, int], tuple[int, int]]
"""(left id, right id) -> (rank, joined id)."""


def byte_symbols() -> list[str]:
    """The character that stands for each byte in vocab.json: the byte's own if it is printable, else one from U+0100
    on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [value for value in range(256) if value not in printable]
    return [chr(value) if value in printable else chr(256 + hidden.index(value)) for value in range(256)]


class GPT2Tokenizer:
    """GPT-2's tokenizer. Raises DataError where the files are damaged or do not belong together."""

    def __init__(self, vocab_file: Path, merges_file: Path) -> None:
        vocab = read_vocab(vocab_file)
        symbols = byte_symbols()
        missing = [value for value, symbol in enumerate(symbols) if symbol not in vocab]
        if missing:
            raise DataError(
                f"{vocab_file} has no token for {len(missing)} of the 256 bytes, the first of them {missing[0]}"
            )
        self._vocab = vocab
        self.vocab_size = max(vocab.values()) + 1
        self.eod_id: int | None = vocab.get(END_OF_TEXT)
        self._symbols = symbols
        self._first = [vocab[symbol] for symbol in symbols]
        self.merges = _ranked(merges_file, vocab)
        self._library = _library_model(vocab, self.merges)
        byte_of = {symbol: value for value, symbol in enumerate(symbols)}
        self._bytes = {number: _token_bytes(token, byte_of) for token, number in vocab.items()}
        self._words = _pattern().findall
        self._remembered = lru_cache(maxsize=REMEMBERED)(self._join)

    def pieces(self) -> Mapping[str, int]:
        return self._vocab

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._words(text):
            ids += self._remembered(word) if len(word) <= 64 else self._join(word)
        return ids

    def decode(self, ids: list[int]) -> str:
        try:
            return b"".join([self._bytes[number] for number in ids]).decode("utf-8", errors="replace")
        except KeyError as error:
            raise DataError(
                f"token id {error.args[0]} is not in the tokenizer's vocabulary of {self.vocab_size}"
            ) from None

    def _join(self, word: str) -> tuple[int, ...]:
        data = word.encode("utf-8")
        if self._library is None:
            return tuple(apply_merges([self._first[value] for value in data], self.merges))
        return tuple(token.id for token in self._library.tokenize("".join([self._symbols[value] for value in data])))


def apply_merges(ids: Sequence[int], merges: Merges) -> list[int]:
    """Join the pair that comes first in the merges at all its places, from the left; repeat until no pair is left.

    It uses a linked list of ids and a heap of pairs, and takes n log n steps for n ids.
    """
    tokens = [*ids, NONE]
    after, before = list(range(1, len(tokens) + 1)), list(range(-1, len(tokens) - 1))
    heap: list[tuple[int, int, int, int]] = []

    def pair_at(place: int) -> tuple[int, int, int, int] | None:
        rank, _ = merges.get((tokens[place], tokens[after[place]]), (NONE, NONE))
        return None if rank == NONE else (rank, place, tokens[place], tokens[after[place]])

    heap = [pair for pair in map(pair_at, range(len(tokens) - 1)) if pair is not None]
    heapify(heap)
    while heap:
        rank, now = heap[0][0], []
        while heap and heap[0][0] == rank:
            now.append(heappop(heap))
        for _, place, left, right in now:
            behind = after[place]
            if tokens[place] != left or tokens[behind] != right:
                continue  # another join has taken one of them
            tokens[place], tokens[behind] = merges[left, right][1], NONE
            after[place] = after[behind]
            before[after[behind]] = place
            for neighbour in (before[place], place):
                pair = pair_at(neighbour) if neighbour >= 0 else None
                if pair is not None:
                    heappush(heap, pair)
    return [token for token in tokens if token != NONE]


def _library_model(vocab: Mapping[str, int], merges: Merges) -> Any:
    """The BPE model of the `tokenizers` library; None where its result could differ from `join`.

    The library joins the first pair of the list at each step, also one that has just been made. `join` first joins all
    places of one pair. The results are the same unless a join makes a pair that comes earlier in the list; merges from
    training never do that.
    """
    made: dict[int, int] = {}
    for rank, joined in merges.values():
        made[joined] = max(made.get(joined, -1), rank)
    if any(made.get(half, -1) > rank for pair, (rank, _) in merges.items() for half in pair):
        return None
    from tokenizers import models

    names = {number: token for token, number in vocab.items()}
    return models.BPE(dict(vocab), [(names[left], names[right]) for left, right in merges])


def _pattern() -> Any:
    try:
        import regex
    except ImportError as error:
        raise ImportError("the gpt2 tokenizer needs the package regex: pip install regex") from error
    return regex.compile(WORDS)


def read_vocab(path: Path) -> dict[str, int]:
    """vocab.json: token -> id. Raises DataError, also for two tokens with one id."""
    with raised_as(DataError):
        vocab = read_json(path, BOUNDS.tokenizer)
    if (
        not isinstance(vocab, dict)
        or not vocab
        or not all(type(number) is int and number >= 0 for number in vocab.values())
    ):
        raise DataError(f"{path} is no table of tokens and ids")
    if max(vocab.values()) >= BOUNDS.vocabulary:
        raise DataError(f"{path} holds the id {max(vocab.values())}; ids are below {BOUNDS.vocabulary:,}")
    if len(set(vocab.values())) != len(vocab):
        raise DataError(f"{path} gives {len(vocab)} tokens {len(set(vocab.values()))} different ids")
    return vocab


def read_merges(path: Path) -> list[tuple[int, list[str]]]:
    """merges.txt: (line number, its words), without blank lines and the version in the first line. Raises DataError."""
    with raised_as(DataError):
        lines = read_text(path, BOUNDS.tokenizer).split("\n")
    start = 1 if lines[0].startswith("#version") else 0
    return [
        (number, line.rstrip("\r").split(" "))
        for number, line in enumerate(lines[start:], start=start + 1)
        if line.strip()
    ]


def _ranked(path: Path, vocab: dict[str, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(left id, right id) -> (rank, joined id) in the order of the file. Of two equal lines the first counts."""
    merges: dict[tuple[int, int], tuple[int, int]] = {}
    for number, halves in read_merges(path):
        unknown = [token for token in (*halves, "".join(halves)) if token not in vocab]
        if len(halves) != 2 or unknown:
            raise DataError(f"{path}, line {number}: {shown(' '.join(halves))} is no pair of tokens of the vocabulary")
        merges.setdefault((vocab[halves[0]], vocab[halves[1]]), (number, vocab["".join(halves)]))
    return {pair: (rank, joined) for rank, (pair, (_, joined)) in enumerate(merges.items())}


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """The bytes of a token. An added token may have characters outside the byte alphabet; it is encoded as UTF-8."""
    if all(symbol in byte_of for symbol in token):
        return bytes(byte_of[symbol] for symbol in token)
    return token.encode("utf-8")
