"""Texts of a data set of the package datasets become the pair that the same texts as JSON lines become."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megazero.cli.data_commands import main
from megazero.data.dataset_rows import DatasetRows
from megazero.data.indexed import DataError
from megazero.data.input_files import ReaderOptions
from megazero.data.preprocess import PreprocessJob, preprocess, write_pair
from megazero.data.progress import silent

TEXTS = ["Zürich\nand\tmore", "", 'a "quoted" text \\', " " * 7, "\x00 and 🙂 \u2028 line", "x" * 3000]
TEXTS += [f"row {number}" for number in range(2500)]
"""More rows than the package hands over at once, and an empty one."""


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, whose copies go into a folder of the test."""
    package = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "copies")
    return package


def table(datasets: Any) -> Any:
    return datasets.Dataset.from_dict({"number": [*range(len(TEXTS))], "content": TEXTS})


def from_json_lines(folder: Path) -> None:
    """The pair `expected`, from a file of lines."""
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))
    job = PreprocessJob("byte", None, ReaderOptions(json_key="content"), append_eod=True)
    preprocess([lines], folder / "expected", job, workers=1, report=silent)


PLACES: dict[str, Callable[[Any], str]] = {
    "table.parquet": lambda datasets: table(datasets).to_parquet("table.parquet") and "table.parquet",
    "table.jsonl": lambda datasets: table(datasets).to_json("table.jsonl") and "table.jsonl",
    "folder": lambda datasets: table(datasets).to_parquet("folder/train-00000.parquet") and "folder",
    "saved": lambda datasets: table(datasets).save_to_disk("saved") or "saved",
    "splits": lambda datasets: datasets.DatasetDict(train=table(datasets)).save_to_disk("splits") or "splits",
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_the_pair_is_that_of_json_lines(place: str, streaming: bool, datasets: Any, tmp_path: Path) -> None:
    from_json_lines(tmp_path)
    rows = DatasetRows(PLACES[place](datasets), None if place == "saved" else "train", "content", streaming)
    job = PreprocessJob("byte", None, ReaderOptions(json_key="content"), append_eod=True)
    pair = write_pair(rows.source(), tmp_path / "pair", job, workers=1, report=silent)
    assert pair.documents == len(TEXTS)
    for ending in ("bin", "idx", "tokenizer"):
        assert (tmp_path / f"pair.{ending}").read_bytes() == (tmp_path / f"expected.{ending}").read_bytes()


def test_the_command_with_workers(datasets: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_json_lines(tmp_path)
    words = f"--dataset {PLACES['table.parquet'](datasets)} --column content --output-prefix pair --tokenizer byte"
    assert main("prepare-data", [*words.split(), "--append-eod", "--workers", "2"]) == 0
    assert f"{len(TEXTS):,} documents" in capsys.readouterr().out
    assert Path("pair.bin").read_bytes() == Path("expected.bin").read_bytes()
    assert Path("pair.idx").read_bytes() == Path("expected.idx").read_bytes()


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("org/texts", ("org/texts", None, None)),
        ("org/texts:en", ("org/texts", "en", None)),
        ("hf://org/texts@v2:20231101.de", ("org/texts", "20231101.de", "v2")),
    ],
)
def test_what_the_package_is_asked_for(
    name: str, asked: tuple[str | None, ...], datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load(path: str, config: str | None, *, split: str, revision: str | None, streaming: bool) -> Any:
        calls.append((path, config, revision, split, streaming))
        return table(datasets).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = DatasetRows(name, "validation", "content", streaming=True).source()
    assert calls == [(*asked, "validation", True)] and source.total is None
    assert [batch[0].line for _, batch in source.batches(None)] == [1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "words", "told"),
    [
        ("table.parquet", "", r"there is no column 'text'; it has number, content"),
        ("table.parquet", "--column contents", r"no column 'contents'; did you mean content\?; it has number, content"),
        ("table.parquet", "--column number", r"table.parquet, row 0: 'number' holds a number, and no text"),
        ("table.parquet", "--split test", r"--split test: the package datasets cannot read it: .*train"),
        ("splits", "--split test", r"there is no split 'test'; --split is one of train"),
        ("saved", "--split test", r"the folder holds one split, without a name: drop --split"),
        (
            "org/none",
            "",
            r"--dataset org/none: there is no such folder or file here, and the package datasets cannot .*org/none",
        ),
        ("table.parquet", "--input x", r"--input and --dataset exclude each other: name files by --input"),
        ("table.parquet", "--json-key a --format jsonl", r"--json-key and --format go with --input"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_mistakes(
    place: str, words: str, told: str, streaming: bool, datasets: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = PLACES[place](datasets) if place in PLACES else place
    line = f"--dataset {name} --output-prefix pair --tokenizer byte --workers 1 {words}"
    assert main("prepare-data", [*line.split(), *(["--streaming"] if streaming else [])]) == 2
    answer = capsys.readouterr().err
    assert re.search(told, answer), answer
    assert not [*Path().glob("pair*")]


def test_flags_of_a_data_set_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        ("", "there is no text: name files by --input, or a data set of the package datasets by --dataset"),
        (f"--input {tmp_path} --split train --streaming", "--split and --streaming go with --dataset"),
        (f"--input {tmp_path} --column a", "--column goes with --dataset"),
    ):
        assert main("prepare-data", [*words.split(), *"--output-prefix pair --tokenizer byte".split()]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("version", [None, "3.6.0"])
def test_a_package_that_is_missing_or_executes_code(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = None if version is None else ModuleType("datasets")
    if package is not None:
        package.__version__ = version
    monkeypatch.setitem(sys.modules, "datasets", package)
    told = "pip install datasets" if version is None else "needs datasets 4 or later, which executes no code .* 3.6.0"
    with pytest.raises(ImportError, match=told):
        DatasetRows("org/texts").source()


def test_a_row_without_a_text_is_named(datasets: Any) -> None:
    datasets.Dataset.from_dict({"text": ["a", None, "b"]}).to_parquet("gap.parquet")
    source = DatasetRows("gap.parquet").source()
    with pytest.raises(DataError, match=r"gap\.parquet, row 1: 'text' holds null, and no text"):
        [*source.batches(None)]  # type: ignore[arg-type]
