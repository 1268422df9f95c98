"""A pair says which tokenizer its ids are of, and is refused with another."""

import json
from pathlib import Path

import numpy as np
import pytest

from megazero.config.schema import DataConfig
from megazero.data.build import build_datasets
from megazero.data.indexed import DataError
from megazero.data.preprocess import PreprocessJob, preprocess
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer
from megazero.data.tokenizer_record import path_of, read_tokenizer_record, tokenizer_record
from megazero.data.train_bpe import train_bpe
from megazero.data.writer import PairWriter, merge
from tests.data.pairs import write_pair

WORDS = "the cat sat on the mat and the dog sat on the cat; " * 40


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Tokenizers a and b, of as many tokens; a again as tokenizer.json; texts of a, b and bytes."""
    folder = tmp_path_factory.mktemp("made")
    train_bpe([WORDS], 280, folder / "a", silent)
    train_bpe([WORDS[::-1]], 280, folder / "b", silent)
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(folder / "a" / "vocab.json"), str(folder / "a" / "merges.txt"))
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.add_special_tokens(["<|endoftext|>"])
    (folder / "hf").mkdir()
    model.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "in.txt").write_text(WORDS)
    for name, job in {
        "a": PreprocessJob("gpt2", str(folder / "a")),
        "b": PreprocessJob("gpt2", str(folder / "b")),
        "bytes": PreprocessJob("byte", None),
    }.items():
        preprocess([folder / "in.txt"], folder / f"of-{name}", job, workers=1, report=silent)
    write_pair(folder / "silent", [60] * 4, 200)
    return folder


def _build(place: Path, prefix: str, kind: str, path: str | None):
    cfg = DataConfig(data_path=(str(place / prefix),), split="1", tokenizer=kind, data_cache_path=str(place / "cache"))
    tokenizer = build_tokenizer(kind, None if path is None else str(place / path))
    return build_datasets(cfg, seq_length=8, samples=(4, 0, 0), vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("prefix", "kind", "path"), [("of-a", "gpt2", "a"), ("of-a", "hf", "hf"), ("of-bytes", "byte", None)]
)
def test_data_of_the_run_s_tokenizer_are_taken_whatever_reads_it(place, prefix, kind, path):
    assert len(_build(place, prefix, kind, path).train) >= 4


@pytest.mark.parametrize(
    ("prefix", "kind", "path"), [("of-b", "gpt2", "a"), ("of-b", "hf", "hf"), ("of-bytes", "gpt2", "a")]
)
def test_data_of_another_tokenizer_are_refused(place, prefix, kind, path):
    with pytest.raises(
        DataError, match=rf"{prefix}\.bin was made with another tokenizer \(.* tokens, hash \w+\) than the run has"
    ):
        _build(place, prefix, kind, path)


def test_data_that_do_not_say_are_taken(place):
    assert len(_build(place, "silent", "gpt2", "a").train) >= 4
    assert read_tokenizer_record(place / "silent") is None


def test_one_merge_or_one_token_makes_another_tokenizer(place, tmp_path):
    first = tokenizer_record(build_tokenizer("gpt2", str(place / "a")), "gpt2")
    vocab, merges = (place / "a" / "vocab.json").read_text(), (place / "a" / "merges.txt").read_text().splitlines()
    swapped = json.loads(vocab)
    swapped["Ā"], swapped["ā"] = swapped["ā"], swapped["Ā"]
    for number, (table, lines) in enumerate(
        [(vocab, merges[:-1]), (vocab, [merges[0], *merges[:0:-1]]), (json.dumps(swapped), merges)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "vocab.json").write_text(table)
        (folder / "merges.txt").write_text("\n".join(lines))
        assert tokenizer_record(build_tokenizer("gpt2", str(folder)), "gpt2").hash != first.hash
    assert tokenizer_record(build_tokenizer("hf", str(place / "hf")), "hf").hash == first.hash


def test_joined_pairs_are_of_one_tokenizer(place, tmp_path):
    a, b, unknown = (str(place / name) for name in ("of-a", "of-b", "silent"))
    merge([a, a], str(tmp_path / "same"))
    assert read_tokenizer_record(tmp_path / "same") == read_tokenizer_record(a) is not None
    merge([a, unknown], str(tmp_path / "mixed"))
    assert not path_of(tmp_path / "mixed").exists()
    with pytest.raises(DataError, match=r"of-a and .*of-b were made with different tokenizers"):
        merge([a, unknown, b], str(tmp_path / "other"))
    assert not list(tmp_path.glob("other*"))


def test_what_lay_there_before_goes_with_its_pair(place, tmp_path):
    merge([str(place / "of-a")], str(tmp_path / "p"))
    assert path_of(tmp_path / "p").exists()
    with PairWriter(tmp_path / "p", np.dtype("<u2"), overwrite=True) as writer:
        writer.write(np.arange(3, dtype="<u2"), [3])
    assert not path_of(tmp_path / "p").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'{"hash": 5}',
        b'{"tokenizer": "x", "vocab_size": 5, "hash": "y", "format": 2}',
        b"[" * 10**5,
        b"\xff",
    ],
)
def test_a_damaged_file_is_named(place, tmp_path, content):
    write_pair(tmp_path / "p", [60] * 4, 200)
    path_of(tmp_path / "p").write_bytes(content)
    with pytest.raises(DataError, match=r"p\.tokenizer is no valid record of a tokenizer"):
        _build(tmp_path, "p", "byte", None)
