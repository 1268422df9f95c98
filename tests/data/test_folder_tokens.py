"""Tokens that only the files beside a tokenizer name: ids, texts and the end of documents, beside `transformers`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megazero.data.indexed import DataError
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer
from megazero.data.train_bpe import train_bpe

TEXT = "the cat sat on the mat, and the dog saw it; a bird sang all day above the old red barn "
ADDED = {"<pad>": 600, "<|im_start|>": 601, "<|im_end|>": 602, "<tool>": 603}
SPOKEN = (
    "the cat",
    "the <tool> cat",
    "the<tool>cat",
    "<tool>the cat<tool> sat",
    "a  <tool>  dog<pad>",
    "the <pad><tool> mat",
)


def written(folder: Path, **files: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model of 600 tokens."""
    library = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text("\n".join(f"{TEXT}{number} {chr(97 + number % 26)}" for number in range(500)))
    library.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, remove_extra_whitespaces=False,
        normalization_rule_name="identity",
    )  # fmt: skip
    return folder


def numbered(start: int) -> dict[str, int]:
    return {token: start + place for place, token in enumerate(ADDED)}


@pytest.mark.parametrize("legacy", [True, False])
def test_added_to_sentencepiece(legacy: bool, pieces: Path, tmp_path: Path) -> None:
    """Text and ids as transformers has them; a special token in a text stays text, and no input forges the end."""
    transformers = pytest.importorskip("transformers")
    shutil.copy(pieces / "tokenizer.model", tmp_path)
    alone = build_tokenizer("sentencepiece", str(tmp_path))
    added = numbered(alone.vocab_size)
    written(
        tmp_path,
        added_tokens=added,
        tokenizer_config={"tokenizer_class": "LlamaTokenizer", "eos_token": "<|im_end|>", "legacy": legacy},
    )
    mine, theirs = build_tokenizer("sentencepiece", str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (
        (mine.vocab_size, mine.eod_id)
        == (len(theirs), theirs.eos_token_id)
        == (max(added.values()) + 1, added["<|im_end|>"])
    )
    for text in SPOKEN:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert mine.encode(text) == ids and mine.decode(ids) == theirs.decode(ids)
    forged = mine.encode("a<|im_end|>b")
    assert added["<|im_end|>"] not in forged and forged == alone.encode("a<|im_end|>b")
    assert mine.decode([*alone.encode("the"), added["<|im_end|>"], *alone.encode("cat")]) == "the<|im_end|> cat"
    assert mine.pieces() == {**alone.pieces(), **added}
    with pytest.raises(DataError, match=f"token id {mine.vocab_size} is not in"):
        mine.decode([mine.vocab_size])


def test_added_to_vocab_json(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    train_bpe((TEXT for _ in range(20)), 300, tmp_path, silent)
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    added = numbered(build_tokenizer("gpt2", str(tmp_path)).vocab_size)
    decoder = {str(number): {"content": token, "special": token != "<tool>"} for token, number in added.items()}
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "added_tokens_decoder": decoder,
        "eos_token": "<|im_end|>",
    }
    written(tmp_path, tokenizer_config=config)
    mine, theirs = build_tokenizer("gpt2", str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (mine.vocab_size, mine.eod_id) == (len(theirs), theirs.eos_token_id)
    for text in SPOKEN[:4]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert mine.encode(text) == ids and mine.decode(ids) == text


def test_added_to_tokenizer_json(tmp_path: Path) -> None:
    """Tokens that tokenizer.json lacks are added at the ids that the other files give, or refused."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", *dict.fromkeys(TEXT.split())])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    alone = build_tokenizer("hf", str(tmp_path))
    added = numbered(alone.vocab_size)
    decoder = {
        str(number): {
            "content": token, "special": token != "<tool>", "normalized": False, "lstrip": False, "rstrip": False,
            "single_word": False,
        }
        for token, number in added.items()
    }  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": decoder, "eos_token": "<|im_end|>"}
    written(tmp_path, tokenizer_config=config)
    mine, theirs = build_tokenizer("hf", str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (mine.vocab_size, mine.eod_id) == (len(theirs), theirs.eos_token_id)
    for text in SPOKEN[:4]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert mine.encode(text) == ids and mine.decode(ids) == theirs.decode(ids)
    assert mine.encode("a<|im_end|>b") == alone.encode("a<|im_end|>b")
    written(tmp_path, added_tokens={"<far>": added["<tool>"] + 2})
    with pytest.raises(DataError, match=f"add the token '<far>' as {added['<tool>'] + 2}, and here it would be"):
        build_tokenizer("hf", str(tmp_path))


ENDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"eos_token": "cat"}, "cat"),
    ({"eos_token": "nowhere"}, "<|endoftext|>"),
    ({"eos_token": None}, "<|endoftext|>"),
    ({}, "<|endoftext|>"),
)


@pytest.mark.parametrize(("config", "end"), ENDS)
def test_the_end_of_documents_of_tokenizer_json(config: dict[str, Any], end: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<|endoftext|>": 0, "cat": 1, "[UNK]": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "[UNK]")).save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tokenizer_config=config)
    assert build_tokenizer("hf", str(tmp_path)).eod_id == vocab[end]


WRONG = (
    ({"<a>": -1}, "gives '<a>' the id -1; ids are from 0"),
    ({"<a>": "x"}, "gives '<a>' the id 'x'"),
    ({"<a>": 2**40}, "gives '<a>' the id 1099511627776"),
    ({"<a>": 700, "<b>": 700}, "gives 2 tokens 1 different ids"),
)


@pytest.mark.parametrize(("added", "message"), WRONG)
def test_added_ids_that_are_none(added: dict[str, Any], message: str, pieces: Path, tmp_path: Path) -> None:
    shutil.copy(pieces / "tokenizer.model", tmp_path)
    written(tmp_path, added_tokens=added)
    with pytest.raises(DataError, match=message):
        build_tokenizer("sentencepiece", str(tmp_path))


def test_a_model_of_another_name_stands_alone(pieces: Path, tmp_path: Path) -> None:
    """The other files of its folder may belong to another tokenizer."""
    shutil.copy(pieces / "tokenizer.model", tmp_path / "mine.model")
    written(tmp_path, added_tokens={"<a>": 700})
    assert build_tokenizer("sentencepiece", str(tmp_path)).vocab_size < 700
