"""Tokenizers: from text to ids and back. Each kind is built from a name and a path, so that workers can build their
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from megazero.data.folder_tokens import completed
from megazero.data.gpt2 import GPT2Tokenizer
from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer, SentencePieceTokenizer
from megazero.system.hub import TOKENIZER, HubError, folder_of


class Tokenizer(Protocol):
    """A tokenizer.

    vocab_size  one more than the largest id
    eod_id      the token that ends a document; None if the tokenizer has none
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Text that spells a special token is encoded as text, so no input can forge a separator."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD. Raises DataError for an id outside the vocabulary."""


class ListedTokenizer(Tokenizer, Protocol):
    """A tokenizer that can list all its tokens."""

    def pieces(self) -> Mapping[str, int]:
        """Token -> id, for all tokens, in the spelling of the tokenizer's files."""


class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are UTF-8 bytes; 256 ends a document."""

    vocab_size = 257
    eod_id = 256

    def pieces(self) -> Mapping[str, int]:
        return {f"<{number}>": number for number in range(self.vocab_size)}

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        wrong = [number for number in ids if not 0 <= number < self.vocab_size]
        if wrong:
            raise DataError(f"token id {wrong[0]} is outside the byte tokenizer's vocabulary of {self.vocab_size}")
        return b"".join(b"<|endoftext|>" if number == self.eod_id else bytes([number]) for number in ids).decode(
            "utf-8", errors="replace"
        )


def _byte(path: str | None) -> ListedTokenizer:
    return ByteTokenizer()


def gpt2_files(path: str | None) -> tuple[Path, Path]:
    """The paths of vocab.json and merges.txt, which may also be called NAME-vocab.json and NAME-merges.txt.

    path: the folder, the path of vocab.json, or the path up to NAME. Raises DataError if a file is missing.
    """
    place = _need(path, "gpt2", "the folder of vocab.json and merges.txt, or the path up to -vocab.json")
    if place.name.endswith("vocab.json"):
        files = place, place.with_name(place.name.removesuffix("vocab.json") + "merges.txt")
    elif not place.is_dir():
        files = place.with_name(f"{place.name}-vocab.json"), place.with_name(f"{place.name}-merges.txt")
    else:
        files = _only(place, "vocab.json"), _only(place, "merges.txt")
    for file in files:
        if not file.is_file():
            raise DataError(f"--tokenizer-path {path}: no file {file}")
    return files


def _gpt2(path: str | None) -> ListedTokenizer:
    vocab, merges = gpt2_files(path)
    base = GPT2Tokenizer(vocab, merges)
    return completed(base, vocab.parent, base.encode) if vocab.name in OF_A_MODEL else base


def sentencepiece_file(path: str | None) -> Path:
    """The .model file at this path, or the only one in this folder. Raises DataError."""
    place = _need(path, "sentencepiece", "the .model file")
    return _only(place, ".model") if place.is_dir() else place


def _sentencepiece(path: str | None) -> ListedTokenizer:
    file = sentencepiece_file(path)
    base = SentencePieceTokenizer(file)
    return completed(base, file.parent, base.encode_inside) if file.name in OF_A_MODEL else base


def _hf(path: str | None) -> ListedTokenizer:
    place = _need(path, "hf", "tokenizer.json or its folder")
    return HuggingFaceTokenizer(place / "tokenizer.json" if place.is_dir() else place)


OF_A_MODEL = ("vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Names of a model's own files. The files beside one of another name may belong to something else."""
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


KINDS: dict[str, Callable[[str | None], ListedTokenizer]] = {
    "byte": _byte,
    "gpt2": _gpt2,
    "sentencepiece": _sentencepiece,
    "hf": _hf,
}


def build_tokenizer(kind: str, path: str | None) -> ListedTokenizer:
    """The tokenizer of --tokenizer and --tokenizer-path. Raises DataError, or ImportError with what to install."""
    if kind not in KINDS:
        raise DataError(f"--tokenizer {kind!r}: known are {', '.join(KINDS)}")
    return KINDS[kind](path)


def carried_files(kind: str, path: str | None) -> dict[str, Path]:
    """The files of a tokenizer under the names by which a model's own are known, with those beside them that say more
    of it. None for a tokenizer without files. Raises DataError for files that are missing.
    """
    if kind == "gpt2":
        vocab, merges = gpt2_files(path)
        found, first = {"vocab.json": vocab, "merges.txt": merges}, vocab
    elif kind == "sentencepiece":
        first = sentencepiece_file(path)
        found = {"tokenizer.model": first}
    elif kind == "hf":
        place = _need(path, "hf", "tokenizer.json or its folder")
        first = place / "tokenizer.json" if place.is_dir() else place
        found = {"tokenizer.json": first}
    else:
        return {}
    beside = [first.with_name(name) for name in BESIDE] if first.name in (*OF_A_MODEL, "tokenizer.json") else []
    return found | {file.name: file for file in beside if file.is_file()}


def _need(path: str | None, kind: str, what: str) -> Path:
    if not path:
        raise DataError(f"--tokenizer {kind} needs --tokenizer-path: {what}")
    return place_of(path)


def place_of(path: str) -> Path:
    """The file or folder of a --tokenizer-path, which may be a name of the Hub. Raises DataError."""
    try:
        return folder_of(path, TOKENIZER)
    except HubError as error:
        raise DataError(f"--tokenizer-path: {error}") from error


def _only(folder: Path, ending: str) -> Path:
    """The file `ending` in the folder, or the only file whose name ends with it. Raises DataError."""
    exact = folder / ending.lstrip("-")
    if exact.is_file():
        return exact
    found = sorted(path for path in folder.iterdir() if path.name.endswith(ending))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise DataError(f"--tokenizer-path {folder}: one file must end in {ending}; found {names}")
    return found[0]
