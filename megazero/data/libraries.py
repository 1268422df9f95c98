"""Tokenizers of other libraries, which are imported when they are used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from megazero.data.folder_tokens import FolderTokens, read_folder_tokens
from megazero.data.indexed import DataError
from megazero.data.special import CUT, SpecialTokens
from megazero.system.reading import BOUNDS, parse_json, raised_as, read_bytes, read_text, shown

BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Tokens for single bytes of text without another token."""
Encoded = list[tuple[int, int, int]]
"""(id, start, stop) of each token: its id and the range of the text's characters that it covers."""
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""Tokens that end a document where tokenizer_config.json names none, the likeliest first."""


class SentencePieceTokenizer:
    """A sentencepiece .model file. Its normalisation may change the text.

    Raises DataError for a file that is no such model, ImportError without the package.
    """

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ImportError(
                "--tokenizer sentencepiece needs the package sentencepiece: pip install sentencepiece"
            ) from error
        _require(path)
        try:
            with raised_as(DataError):
                data = read_bytes(path, BOUNDS.tokenizer)
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (RuntimeError, TypeError) as error:
            raise DataError(f"{path} is no sentencepiece model: {error}") from error
        self.vocab_size: int = self._model.vocab_size()
        if not self.vocab_size:
            raise DataError(f"{path} holds no tokens")
        end = self._model.eos_id()
        self.eod_id: int | None = end if end >= 0 else None

    def pieces(self) -> Mapping[str, int]:
        return {self._model.id_to_piece(number): number for number in range(self.vocab_size)}

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_inside(self, text: str) -> list[int]:
        """As `encode`, without the blank that a model may put before a text: the ids behind a character that no token
        joins with others.
        """
        before, unknown = self._model.encode(CUT), self._model.unk_id()
        behind: list[int] = self._model.encode(CUT + text)[len(before) :]
        # The model makes one token of unknown characters in a row, and without bytes the first one is unknown.
        joined = before[-1] == unknown == self._model.encode(text[:1])[-1]
        return [unknown, *behind] if joined else behind

    def decode(self, ids: list[int]) -> str:
        _require_below(ids, self.vocab_size)
        return self._model.decode(ids)


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library. `encode` adds no special tokens and reads none in the text.

    Raises DataError for a file that is no such tokenizer, ImportError without the package.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError("--tokenizer hf needs the package tokenizers: pip install tokenizers") from error
        _require(path)
        self.path = path
        with _library(path):
            self._model: Any = tokenizers.Tokenizer.from_str(_checked_content(path))
            self._model.encode_special_tokens = True
            self.dropout: float | None = getattr(self._model.model, "dropout", None)
            if self.dropout is not None:
                self._model.model.dropout = None
            self._model.no_truncation()
            self._model.no_padding()
            self.tokens = beside = read_folder_tokens(path.parent)
            self._complete(beside)
            self._prefix(beside.prefix_space)
            ids = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values(), default=-1) + 1
        if not self.vocab_size:
            raise DataError(f"{path} holds no tokens")
        ends = (beside.end, *SEPARATORS)
        self.eod_id: int | None = next((ids[token] for token in ends if token in ids), None)
        with _library(path):
            self.begins, self.ends = self._frame()
        """Ids that the library would put before a text, such as a begin token, and behind it. `encode` does not."""
        special = {
            number: token.content for number, token in self._model.get_added_tokens_decoder().items() if token.special
        }
        self.joins_pairs = type(self._model.model).__name__ == "BPE"
        self.special_tokens = SpecialTokens([*special.values()])
        unknown = _unknown(self._model.to_str())
        self._special = {
            number: text for number, text in special.items() if number != unknown and not BYTE.fullmatch(text)
        }

    def _complete(self, beside: FolderTokens) -> None:
        """Add the tokens that only the files beside tokenizer.json name. Raises DataError if one gets another id.

        The tokens that begin and end a text become special ones, also where the vocabulary has them as words.
        """
        import tokenizers

        missing = {token: number for token, number in beside.added.items() if self._model.token_to_id(token) is None}
        for token, number in sorted(missing.items(), key=lambda item: item[1]):
            if (there := self._model.id_to_token(number)) is not None:
                raise DataError(
                    f"the files beside {self.path} add the token {shown(token)} as {number}, which is the id of "
                    f"{shown(there)}: the files are of different tokenizers"
                )
            special = token in beside.special
            flags = {"normalized": not special, **beside.flags.get(token, {})}
            self._model.add_tokens([tokenizers.AddedToken(token, special=special, **flags)])
            if (id_here := self._model.token_to_id(token)) != number:
                raise DataError(
                    f"the files beside {self.path} add the token {shown(token)} as {number}, and here it would be "
                    f"{id_here}: tokens between are missing"
                )

        there = {token.content for token in self._model.get_added_tokens_decoder().values()}
        named = [beside.named.get(name, "") for name in ("bos_token", "eos_token")]
        self._model.add_special_tokens(
            [
                tokenizers.AddedToken(token, special=True, normalized=False)
                for token in named
                if len(token) > 1 and token not in there and self._model.token_to_id(token) is not None
            ]
        )

    def _prefix(self, space: bool | None) -> None:
        """Let tokenizer_config.json say whether a blank is put before a text, for classes where it does."""
        import tokenizers

        words = self._model.pre_tokenizer
        if space is not None and isinstance(words, tokenizers.pre_tokenizers.ByteLevel):
            words.add_prefix_space = space
            self._model.pre_tokenizer = words

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        encoded = self._model.encode("a", add_special_tokens=True)
        inside = [place for place, special in enumerate(encoded.special_tokens_mask) if not special]
        first, last = (inside[0], inside[-1] + 1) if inside else (0, len(encoded.ids))
        return tuple(encoded.ids[:first]), tuple(encoded.ids[last:])

    def id_of(self, token: str) -> int | None:
        """The id of this token, which may be a special one; None if there is none."""
        found: int | None = self._model.token_to_id(token)
        return found

    def pieces(self) -> Mapping[str, int]:
        found: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        if self._special.keys().isdisjoint(ids):
            return ids
        # A Unigram model can produce special tokens from plain text.
        (parted,) = self.encode_written([self.special_tokens.parted(text)])
        return [number for number, _, _ in parted]

    def decode(self, ids: list[int]) -> str:
        _require_below(ids, self.vocab_size)
        return self._model.decode(ids, skip_special_tokens=False)

    def decode_without_specials(self, ids: list[int]) -> str:
        """As `decode`, without special tokens."""
        _require_below(ids, self.vocab_size)
        return self._model.decode(ids, skip_special_tokens=True)

    def encode_written(self, texts: list[str]) -> list[Encoded]:
        """Encode texts of a chat template: special tokens in them are tokens; `special.CUT` splits the text and is
        dropped.

        Raises DataError for a text that becomes a special token only by normalisation.
        """
        model, cut = self._written
        return [
            self._checked(text, found, cut)
            for text, found in zip(texts, model.encode_batch(texts, add_special_tokens=False), strict=True)
        ]

    def encode_with_specials(self, text: str) -> list[int]:
        """Encode a text in which special tokens are tokens, as `transformers` does. `special.CUT` is dropped."""
        model, cut = self._written
        return [number for number in model.encode(text, add_special_tokens=False).ids if number != cut]

    def _checked(self, text: str, found: Any, cut: int) -> Encoded:
        encoded = [(number, *place) for number, place in zip(found.ids, found.offsets, strict=True) if number != cut]
        for number, start, stop in encoded:
            if number in self._special and self._special[number] not in text[start:stop]:
                raise DataError(
                    f"the tokenizer takes {text[start:stop]!r} for its special token {self._special[number]}"
                )
        return encoded

    @cached_property
    def _written(self) -> tuple[Any, int]:
        """(the tokenizer with special tokens and `special.CUT`, the id of `special.CUT`)."""
        import tokenizers

        model = tokenizers.Tokenizer.from_str(self._model.to_str())
        model.encode_special_tokens = False
        model.add_special_tokens([tokenizers.AddedToken(CUT, special=True, normalized=False)])
        return model, model.get_vocab(with_added_tokens=True)[CUT]


@contextmanager
def _library(path: Path) -> Iterator[None]:
    """Turn the library's errors into DataError. It raises bare Exception, and on a panic a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, DataError):
        raise
    except BaseException as error:
        raise DataError(f"{path} is no tokenizer of the tokenizers library: {error}") from error


def _checked_content(path: Path) -> str:
    """The text of a tokenizer.json whose ids are within bounds. Raises DataError.

    The library allocates memory for all ids up to the largest, and aborts the process if there is not enough.
    """
    with raised_as(DataError):
        text = read_text(path, BOUNDS.tokenizer)
        record = parse_json(text, str(path))
    if not isinstance(record, dict) or not isinstance(record.get("model"), dict):
        raise DataError(f"{path} is no tokenizer of the tokenizers library: it has no model")
    wrong = next((number for number in _ids(record) if not 0 <= number < BOUNDS.vocabulary), None)
    if wrong is not None:
        raise DataError(f"{path} holds the id {shown(wrong)}; ids are from 0 to below {BOUNDS.vocabulary:,}")
    return text


def _ids(record: dict[str, Any]) -> Iterator[int]:
    """All ids in a tokenizer.json: of the vocabulary, of added tokens, and in the post-processor."""
    vocab, added = record["model"].get("vocab"), record.get("added_tokens")
    found = [*(vocab.values() if isinstance(vocab, dict) else ()), record["model"].get("unk_id")]
    found += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    waiting = [record.get("post_processor")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
        else:
            found.append(part)
    return (number for number in found if type(number) is int)


def _unknown(written: str) -> int | None:
    """The id of the unknown token in a tokenizer.json's content; None if there is none."""
    record = json.loads(written)
    model, added = record["model"], {token["content"]: token["id"] for token in record["added_tokens"]}
    found: int | None = model["unk_id"] if "unk_id" in model else added.get(model.get("unk_token"))
    return found


def _require(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"--tokenizer-path: no file {path}")


def _require_below(ids: list[int], size: int) -> None:
    wrong = [number for number in ids if not 0 <= number < size]
    if wrong:
        raise DataError(f"token id {wrong[0]} is not in the tokenizer's vocabulary of {size}")
