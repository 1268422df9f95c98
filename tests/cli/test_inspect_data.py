"""`megazero inspect-data`: the file that it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megazero.cli.main import main
from megazero.data.preprocess import PreprocessJob, preprocess
from megazero.data.progress import silent
from megazero.data.train_bpe import train_bpe
from tests.data.pairs import write_pair


def test_a_dump_takes_no_existing_files_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pair(tmp_path / "q", [40])
    words = ["inspect-data", "--data-path", str(tmp_path / "q"), "--data-cache-path", str(tmp_path)]
    words += ["--seq-length", "8", "--split", "1"]
    (file := tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing yet")
    for place, told in (
        (file, f"--dump {file}: is there already; nothing is overwritten"),
        (tmp_path, f"--dump {tmp_path}: is there already; nothing is overwritten"),
        (tmp_path / "link", f"--dump {tmp_path}/link: is there already; nothing is overwritten"),
        (tmp_path / "no" / "x.npz", f"--dump {tmp_path}/no/x.npz: there is no folder {tmp_path}/no"),
        (file / "x.npz", f"--dump {file}/x.npz: there is no folder {file}"),
    ):
        assert main([*words, "--dump", str(place)]) == 2
        said = capsys.readouterr()
        assert said.err.splitlines() == [f"error: {told}"] and said.out == ""
    assert file.read_text() == "mine"
    assert main([*words, "--dump", str(tmp_path / "x.npz")]) == 0
    assert np.load(tmp_path / "x.npz")["train"].shape[1] == 9


def test_a_pair_of_another_tokenizer_is_refused_with_and_without_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_bpe(["some text, twice; " * 40], 270, tmp_path / "bpe", silent)
    (tmp_path / "in.txt").write_text("some text " * 40)
    preprocess([tmp_path / "in.txt"], tmp_path / "p", PreprocessJob("byte", None), workers=1, report=silent)
    words = ["inspect-data", "--data-path", str(tmp_path / "p"), "--data-cache-path", str(tmp_path), "--tokenizer"]
    for more in ([], ["--seq-length", "8", "--split", "1"]):
        assert main([*words, "gpt2", "--tokenizer-path", str(tmp_path / "bpe"), *more]) == 2
        said = capsys.readouterr()
        assert "p.bin was made with another tokenizer (byte of 257" in said.err and said.out == ""
        assert main([*words, "byte", *more]) == 0
        capsys.readouterr()
