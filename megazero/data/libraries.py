"""Tokenizers of other libraries, imported only when asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from megazero.data.indexed import DataError
from megazero.data.special import CUT, SpecialTokens

BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token for a byte of text that has none."""
Encoded = list[tuple[int, int, int]]
"""Ids, each with the range of the text's characters that it stands for."""
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class SentencePieceTokenizer:
    """A sentencepiece .model file. Its normalisation may change the text; byte_fallback and identity models do not."""

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ImportError("--tokenizer sentencepiece needs the package sentencepiece: pip install sentencepiece") from error
        _require(path)
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise DataError(f"{path} is no sentencepiece model: {error}") from error
        self.vocab_size: int = self._model.vocab_size()
        end = self._model.eos_id()
        self.eod_id: int | None = end if end >= 0 else None

    def pieces(self) -> Mapping[str, int]:
        return {self._model.id_to_piece(number): number for number in range(self.vocab_size)}

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: list[int]) -> str:
        _require_below(ids, self.vocab_size)
        return self._model.decode(ids)


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library. No special tokens are added, and none are read out of the text."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError("--tokenizer hf needs the package tokenizers: pip install tokenizers") from error
        _require(path)
        self.path = path
        try:
            self._model: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path} is no tokenizer of the tokenizers library: {error}") from error
        self._model.encode_special_tokens = True
        self._model.no_truncation()
        self._model.no_padding()
        ids = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values()) + 1
        self.eod_id: int | None = next((ids[token] for token in SEPARATORS if token in ids), None)
        self.begins: tuple[int, ...] = self._habit()
        """Ids that the library itself would put before a text, a begin token for instance; `encode` does not."""
        special = {number: token.content for number, token in self._model.get_added_tokens_decoder().items() if token.special}
        self.special_tokens = SpecialTokens([*special.values()])
        unknown = _unknown(self._model.to_str())
        self._special = {number: text for number, text in special.items() if number != unknown and not BYTE.fullmatch(text)}

    def _habit(self) -> tuple[int, ...]:
        encoded = self._model.encode("a", add_special_tokens=True)
        first = encoded.special_tokens_mask.index(0) if 0 in encoded.special_tokens_mask else 0
        return tuple(encoded.ids[:first])

    def id_of(self, token: str) -> int | None:
        """The id of a token that is written like this, special ones included; None where there is none."""
        found: int | None = self._model.token_to_id(token)
        return found

    def pieces(self) -> Mapping[str, int]:
        found: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        if self._special.keys().isdisjoint(ids):
            return ids
        # A model over whole words (Unigram) finds special tokens among them by itself.
        (parted,) = self.encode_written([self.special_tokens.parted(text)])
        return [number for number, _, _ in parted]

    def decode(self, ids: list[int]) -> str:
        _require_below(ids, self.vocab_size)
        return self._model.decode(ids, skip_special_tokens=False)

    def decode_without_specials(self, ids: list[int]) -> str:
        """As `decode`, special tokens left out."""
        _require_below(ids, self.vocab_size)
        return self._model.decode(ids, skip_special_tokens=True)

    def encode_written(self, texts: list[str]) -> list[Encoded]:
        """Texts in which special tokens stand for themselves, as a chat template writes them; `special.CUT` is a border and is left out.

        Raises DataError for a text that does not spell a special token, but becomes one by normalisation.
        """
        model, cut = self._written
        return [
            self._checked(text, found, cut) for text, found in zip(texts, model.encode_batch(texts, add_special_tokens=False), strict=True)
        ]

    def encode_with_specials(self, text: str) -> list[int]:
        """Special tokens that the text spells are tokens, as `transformers` takes it; `special.CUT` is left out."""
        model, cut = self._written
        return [number for number in model.encode(text, add_special_tokens=False).ids if number != cut]

    def _checked(self, text: str, found: Any, cut: int) -> Encoded:
        encoded = [(number, *place) for number, place in zip(found.ids, found.offsets, strict=True) if number != cut]
        for number, start, stop in encoded:
            if number in self._special and self._special[number] not in text[start:stop]:
                raise DataError(f"the tokenizer takes {text[start:stop]!r} for its special token {self._special[number]}")
        return encoded

    @cached_property
    def _written(self) -> tuple[Any, int]:
        """The tokenizer with special tokens and the border, and the border's id."""
        import tokenizers

        model = tokenizers.Tokenizer.from_str(self._model.to_str())
        model.encode_special_tokens = False
        model.add_special_tokens([tokenizers.AddedToken(CUT, special=True, normalized=False)])
        return model, model.get_vocab(with_added_tokens=True)[CUT]


def _unknown(written: str) -> int | None:
    """The id that stands for text without a token, of a tokenizer.json's content."""
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
