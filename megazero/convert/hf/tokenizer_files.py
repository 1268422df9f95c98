"""A run's own tokenizer as files that `AutoTokenizer` opens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megazero.convert.companions import is_copyable
from megazero.convert.hf.config import CONFIG, write_json
from megazero.convert.hf.tables import Config
from megazero.convert.source import Source
from megazero.convert.tokenizers import tokenizer_files
from megazero.data.gpt2 import END_OF_TEXT, byte_symbols, read_merges, read_vocab
from megazero.data.indexed import DataError
from megazero.data.tokenizer import BESIDE, gpt2_files, sentencepiece_file

_BELONGING = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


def write_tokenizer(source: Source, folder: Path, config: Config) -> None:
    """Make tokenizer files from the source's tokenizer, unless it brought files of transformers. Where that is not
    possible, the source's report says so.
    """
    if CONFIG in source.companions and any((folder / name).is_file() for name in _BELONGING):
        return
    tokenizer = tokenizer_files(source)
    if tokenizer is None:
        source.report.notes.append("no tokenizer is known: the folder holds the model alone")
        return
    kind, path = tokenizer
    try:
        end = _WRITERS[kind](Path(path or "").expanduser(), folder)
    except (OSError, ValueError) as error:  # DataError among them
        source.report.notes.append(f"no tokenizer was written: {error}")
        return
    if not (folder / "tokenizer_config.json").is_file():
        named = {} if end is None else {"eos_token": end}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_json(folder / "tokenizer_config.json", settings | named)


def _write_bytes(place: Path, folder: Path) -> str:
    """A tokenizer whose ids 0 to 255 are bytes."""
    vocab = {symbol: value for value, symbol in enumerate(byte_symbols())} | {END_OF_TEXT: 256}
    _write_byte_level(folder, vocab, [], {END_OF_TEXT: 256})
    return END_OF_TEXT


def _write_gpt2(place: Path, folder: Path) -> str | None:
    vocab_file, merges_file = gpt2_files(str(place))
    _refuse_links(vocab_file, merges_file)
    vocab, merges = read_vocab(vocab_file), [pair for _, pair in read_merges(merges_file)]
    special = {END_OF_TEXT: vocab[END_OF_TEXT]} if END_OF_TEXT in vocab else {}
    _write_byte_level(folder, vocab, merges, special)
    shutil.copyfile(vocab_file, folder / "vocab.json")
    shutil.copyfile(merges_file, folder / "merges.txt")
    return next(iter(special), None)


def _write_byte_level(
    folder: Path, vocab: Mapping[str, int], merges: list[list[str]], special: Mapping[str, int]
) -> None:
    """A tokenizer.json of the tokenizers library: words as GPT-2 cuts them, and merges of bytes."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    made: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token} | flags for token, number in special.items()],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(vocab),
            "merges": [" ".join(pair) for pair in merges],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")


def _copy_hf(place: Path, folder: Path) -> None:
    """Copy tokenizer.json and the other tokenizer files of transformers."""
    file = place / "tokenizer.json" if place.is_dir() else place
    there = [file, *(file.parent / name for name in BESIDE if (file.parent / name).is_file())]
    _refuse_links(*there)
    for path in there:
        shutil.copyfile(path, folder / ("tokenizer.json" if path == file else path.name))


def _copy_sentencepiece(place: Path, folder: Path) -> None:
    file = sentencepiece_file(str(place))
    _refuse_links(file)
    shutil.copyfile(file, folder / "tokenizer.model")


def _refuse_links(*files: Path) -> None:
    """Raises DataError for a link that leads out of its folder: its target may be something else than a tokenizer."""
    for file in files:
        if not is_copyable(file):
            raise DataError(
                f"{file} is a link to {file.resolve()}, outside of its folder, and such files are not copied"
            )


_WRITERS: Mapping[str, Callable[[Path, Path], str | None]] = {
    "byte": _write_bytes,
    "gpt2": _write_gpt2,
    "hf": _copy_hf,
    "sentencepiece": _copy_sentencepiece,
}
