"""Streamed text is the whole text, in whole characters; stop strings are found wherever tokens begin and end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.data.progress import silent
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.data.train_bpe import train_bpe
from megazero.inference.text import Detokenizer, IdTokenizer, Stream

TEXT = (
    "naïve Ünïcode: 日本語のテキスト, \N{GRINNING FACE}\N{FAMILY} and\ttabs\n\nи кириллица; "
    "1234 \N{REPLACEMENT CHARACTER} the end"
)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(iter([TEXT, "the end of the text and the tabs"] * 3), 300, folder, silent)
    return build_tokenizer("gpt2", str(folder))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As LLaMA's: spaces are marks, the first one of a text is dropped, and characters that are not known are bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    known = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *map(chr, range(97, 123))]
    known += ["th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    model = tokenizers.models.BPE(
        vocab={token: number for number, token in enumerate(known)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path: Path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    made.save(str(path))
    return build_tokenizer("hf", str(path))


KINDS = ["byte", "gpt2", "fallback", "ids"]


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest, gpt2: Tokenizer, fallback: Tokenizer) -> Tokenizer:
    made: dict[str, Callable[[], Tokenizer]] = {
        "byte": lambda: build_tokenizer("byte", None),
        "gpt2": lambda: gpt2,
        "fallback": lambda: fallback,
        "ids": lambda: IdTokenizer(1000),
    }
    return made[request.param]()


def text_for(tokenizer: Tokenizer) -> str:
    return (
        "3 14 159 265 358 979 3 2 384 626 433 832 7 950 288 419 716 939" if isinstance(tokenizer, IdTokenizer) else TEXT
    )


@pytest.mark.parametrize("tokenizer", KINDS, indirect=True)
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer) -> None:
    """For prompts of every length that end with a whole character, none included; a character comes whole or not at
    all.
    """
    ids = tokenizer.encode(text_for(tokenizer)) * 3
    for cut in range(len(ids) // 3):
        prompt = tokenizer.decode(ids[:cut])
        if prompt.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        pieces = Detokenizer(tokenizer, ids[:cut])
        found = [pieces.push(token) for token in ids[cut:]]
        whole = tokenizer.decode(ids)
        assert prompt + "".join(found) + pieces.flush() == whole
        assert pieces.flush() == ""
        assert max(map(len, found)) < 20, "text comes as its tokens do"


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"], indirect=True)
def test_tokens_that_are_no_text(tokenizer: Tokenizer) -> None:
    """What a model says that has learned nothing: bytes of no character. The pieces are still the whole."""
    random.seed(1)
    for _ in range(30):
        ids = [random.randrange(tokenizer.vocab_size) for _ in range(150)]
        pieces = Detokenizer(tokenizer)
        assert "".join(map(pieces.push, ids)) + pieces.flush() == tokenizer.decode(ids)


def pushed(stream: Stream, ids: list[int]) -> str:
    """What is shown of tokens until a stop string; never more than what stands before it."""
    shown = ""
    for token in ids:
        shown += stream.push(token)
        if stream.stopped is not None:
            break
    return shown + stream.finish()


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "fallback"], indirect=True)
def test_stop_strings_across_tokens(tokenizer: Tokenizer) -> None:
    """Every piece of the text is a stop string once: the text ends before its first occurrence, wherever tokens have
    their borders.
    """
    ids = tokenizer.encode(TEXT)
    whole = tokenizer.decode(ids)
    assert whole == TEXT
    for start in range(len(whole)):
        for length in (1, 2, 5):
            stop = whole[start : start + length]
            stream = Stream(tokenizer, (), [stop, "not in the text"])
            assert pushed(stream, ids) == stream.text == whole[: whole.find(stop)]
            assert stream.stopped == stop


def test_the_first_of_several_stop_strings() -> None:
    tokenizer = build_tokenizer("byte", None)
    stream = Stream(tokenizer, (), ["two", "one", "e t"])
    assert pushed(stream, tokenizer.encode("zero one two")) == "zero " and stream.stopped == "one"
    beginning = Stream(tokenizer, (), ["abcd"])
    assert pushed(beginning, tokenizer.encode("xababc")) == "xababc", (
        "a beginning that does not go on is shown at the end"
    )
    assert beginning.stopped is None
    with pytest.raises(ValueError, match="empty"):
        Stream(tokenizer, (), [""])


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    tokenizer = build_tokenizer("byte", None)
    stream = Stream(tokenizer, (), ["aab"])
    assert [stream.push(token) for token in tokenizer.encode("xaaab")] == ["x", "", "", "a", ""]
    assert stream.stopped == "aab" and stream.text == "xa" and stream.push(99) == ""
