"""A checkpoint carries the tokenizer of its run: it works from any folder, after the run's files are gone."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import pytest

from megazero.cli.shared_flags import tokenizer_named
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.loading import load
from megazero.convert.registry import format_table, open_source
from megazero.data.indexed import DataError
from megazero.data.progress import silent
from megazero.data.tokenizer import build_tokenizer
from megazero.data.train_bpe import train_bpe
from tests.data.pairs import write_pair
from tests.parity.training import job_on_rank

MODEL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --precision fp32 --train-iters 1"
BATCH = "--global-batch-size 2 --micro-batch-size 1 --eval-iters 0 --split 1,0,0"
TEXT = "the cat sat on the mat and the dog sat on the log, said the frog to the hog in the fog " * 30


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """(a checkpoint whose run named its tokenizer by a relative path that is gone, the ids of a text)."""
    folder = tmp_path_factory.mktemp("trained")
    train_bpe([TEXT], 300, folder / "bpe", silent)
    ids = build_tokenizer("gpt2", str(folder / "bpe")).encode("the cat")
    write_pair(folder / "d", [60, 60], vocab_size=250)
    words = f"{MODEL} {BATCH} --data-path d --data-cache-path cache --tokenizer gpt2 --tokenizer-path bpe --save saved"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        job_on_rank(0, 1, words.split())[0].fit()
    shutil.rmtree(folder / "bpe")
    return folder / "saved", ids


def test_it_opens_from_anywhere(trained: tuple[Path, list[int]], tmp_path: Path) -> None:
    """In megazero, through its own format and as a Hugging Face folder."""
    transformers = pytest.importorskip("transformers")
    saved, ids = trained
    assert ids != [*b"the cat"]
    with open_source(saved) as source:
        for name in ("hf", "megazero"):
            convert(source, format_table()[name], tmp_path / name, TargetOptions(), silent)
    for place in (saved, tmp_path / "megazero", tmp_path / "hf"):
        model = load(place)
        assert model.tokenizer is not None and model.tokenizer.encode("the cat") == ids
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("the cat")["input_ids"] == ids


def test_another_tokenizer_is_refused(trained: tuple[Path, list[int]], tmp_path: Path) -> None:
    """As `pretrain` refuses it: its ids would be other text. The same one by another name is the same."""
    saved, ids = trained
    train_bpe([TEXT[:200]], 280, tmp_path / "other", silent)
    with open_source(saved) as source:
        convert(source, format_table()["hf"], tmp_path / "hf", TargetOptions(), silent)
    model = load(saved)

    def named(kind: str | None, path: Path | None) -> list[int]:
        args = argparse.Namespace(tokenizer=kind, tokenizer_path=None if path is None else str(path))
        tokenizer = tokenizer_named(args, model)  # type: ignore[arg-type]
        assert tokenizer is not None
        return tokenizer.encode("the cat")

    assert named(None, None) == named("hf", tmp_path / "hf") == named("gpt2", tmp_path / "hf") == ids
    for kind, path in (("gpt2", tmp_path / "other"), ("byte", None)):
        words = rf"^--tokenizer {kind}" + (f" --tokenizer-path {re.escape(str(path))}" if path else "")
        with pytest.raises(
            DataError, match=rf"{words} is another tokenizer \(.*\) than the model's own \(one of 290 tok"
        ):
            named(kind, path)
