"""What is found out before any process group exists: folders that cannot be used, and what is validated on."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.parse import ConfigError, parse_run
from megazero.data.progress import silent
from megazero.prepare import prepare, validation_samples

SHAPE = ["--num-layers", 2, "--hidden-size", 24, "--num-attention-heads", 4, "--seq-length", 16, "--vocab-size", 1003, "--train-iters", 2]


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[object]:
    return [*SHAPE, "--data-path", corpus, "--data-cache-path", tmp_path / "cache"]


def test_every_place_that_cannot_be_used_is_named_at_once(flags: list[object], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    places = ["--save", file / "runs", "--tensorboard-dir", file, "--metrics-file", tmp_path, "--load", file]
    with pytest.raises(ConfigError) as wrong:
        prepare(parse_run([str(word) for word in [*flags, *places]], 1), 1, silent)
    assert set(wrong.value.problems) == {
        f"--save {file}/runs: {file} is no folder",
        f"--tensorboard-dir {file}: {file} is no folder",
        f"--metrics-file {tmp_path}: is a folder; name a file",
        f"--load {file}: is a file; name a folder of checkpoints",
    }
    assert not (tmp_path / "cache").exists(), "nothing is prepared for a run that could not keep its results"


def test_a_folder_without_permission_to_write_is_refused(flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root, who may run tests, may write anywhere
    run = parse_run([str(word) for word in [*flags, "--save", tmp_path / "a" / "b", "--metrics-file", tmp_path / "m"]], 1)
    with pytest.raises(ConfigError) as wrong:
        prepare(run, 1, silent)
    assert [problem.partition(":")[0] for problem in wrong.value.problems] == [
        f"--save {tmp_path}/a/b",
        f"--metrics-file {tmp_path}",
    ]


def test_places_that_are_still_to_be_made_are_fine(flags: list[object], tmp_path: Path) -> None:
    places = [
        "--save",
        tmp_path / "a" / "b c",
        "--load",
        tmp_path / "a" / "b c",
        "--metrics-file",
        tmp_path / "d" / "m",
        "--tensorboard-dir",
    ]
    prepared = prepare(parse_run([str(word) for word in [*flags, *places, tmp_path / "t"]], 1), 1, silent)
    assert len(prepared.datasets.train) >= 48
    assert not (tmp_path / "a").exists(), "looked at, not made"


def test_a_split_without_validation_is_fine_beside_named_sets(flags: list[object], corpus: Path) -> None:
    words = [str(word) for word in [*flags, "--split", "1,0,0"]]
    with pytest.raises(ConfigError, match=r"its valid split is empty.*--eval-iters 0"):
        prepare(parse_run(words, 1), 1, silent)
    run = parse_run([*words, "--valid-data-path", "held-out", str(corpus)], 1)
    datasets = prepare(run, 1, silent).datasets
    assert len(datasets.valid) == 0
    assert len(datasets.named_valid["held-out"]) >= validation_samples(run)


def test_kernels_that_do_not_exist_are_refused(flags: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAZERO_FUSED", "avx1024")
    with pytest.raises(ConfigError, match="MEGAZERO_FUSED=avx1024: choose one of auto, reference"):
        prepare(parse_run([str(word) for word in flags], 1), 1, silent)
