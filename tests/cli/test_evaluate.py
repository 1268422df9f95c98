"""`megazero evaluate` against `transformers` in float64: the loss of every document and of all of them, perplexity and
bits per byte, on any layout.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megazero.cli.evaluate import check as check_flags
from megazero.cli.evaluate import evaluate, main, parser
from megazero.config.source import ConfigError
from megazero.convert.loading import open_model
from megazero.data.indexed import DataError
from megazero.data.tokenizer import ByteTokenizer
from megazero.data.tokenizer_record import path_of, tokenizer_record
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid, single_process_grid
from tests.convert.hf_models import in_double
from tests.evaluation.hf_folder import CASES, CONTEXT, VOCABULARY, folder_of, text
from tests.evaluation.rolling import rolling_windows
from tests.parity.float64 import in_float64
from tests.ranks import run_ranks
from tests.test_structure import ROOT

TEXTS = [text(words, words) for words in (1, 5, 200, 17, 60, 2, 33)] + ["", "Größe: 5 µm\n"]
END = 1


LENGTHS: tuple[list[int], ...] = ([3], [60, 20, 41], [1], [], [49], [48])
"""Of the sequences of each document of a pair: there are such of several, and of none."""
PAIR = [
    [np.random.default_rng(length).integers(0, VOCABULARY, length).tolist() for length in lengths]
    for lengths in LENGTHS
]


def write_pair(prefix: Path, documents: list[list[list[int]]]) -> None:
    """As the format's description has it: sequences back to back, and which of them begin a document."""
    sequences = [ids for document in documents for ids in document]
    lengths = np.array([len(ids) for ids in sequences], dtype="<i4")
    pointers = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    bounds = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    prefix.with_suffix(".bin").write_bytes(np.concatenate([np.array(ids, dtype="<u2") for ids in sequences]).tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(bounds))
    prefix.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its texts as jsonl, and token ids in a pair."""
    pytest.importorskip("transformers")
    made = folder_of("gpt2", tmp_path_factory.mktemp("evaluate"))
    (made / "texts.jsonl").write_text("".join(json.dumps({"text": words}) + "\n" for words in TEXTS))
    write_pair(made / "pair", PAIR)
    return made


def command_line(folder: Path, *words: object) -> list[str]:
    return [str(folder), "--precision", "fp64", "--device", "cpu", *map(str, words)]


def arguments(folder: Path, *words: object) -> Any:
    return parser().parse_args(command_line(folder, *words))


def evaluated(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what is printed, the lines of --output)."""
    output = folder / "scores.jsonl"
    evaluate(arguments(folder, "--json", "--output", output, *words), single_process_grid())
    return json.loads(capsys.readouterr().out), [json.loads(line) for line in output.read_text().splitlines()]


def their_losses(ids: list[list[int]], stride: int, prefix: int | None) -> list[tuple[int, float]]:
    """(tokens, sum of losses in nats) of documents, window by window, one at a time."""
    found, model = [], in_double(CASES["gpt2"])
    with in_float64(), torch.no_grad():
        for document in ids:
            known, rest = (prefix, document) if prefix is not None else (document[0] if document else 0, document[1:])
            total, count = 0.0, 0
            for before, after in rolling_windows(rest, known, CONTEXT, stride):
                logits = model(torch.tensor([before])).logits[0, -len(after) :]
                total += float(F.cross_entropy(logits, torch.tensor(after), reduction="sum"))
                count += len(after)
            found.append((count, total))
    return found


def check(record: dict[str, Any], lines: list[dict[str, Any]], wanted: list[tuple[int, float]]) -> None:
    assert [line["tokens"] for line in lines] == [count for count, _ in wanted]
    for line, (count, total) in zip(lines, wanted, strict=True):
        assert line["total_loss"] == pytest.approx(total, rel=1e-11)
        assert line["loss"] == (pytest.approx(total / count, rel=1e-11) if count else None)
        assert line["perplexity"] == (pytest.approx(math.exp(total / count), rel=1e-10) if count else None)
    count, total = (sum(column) for column in zip(*wanted, strict=True))
    assert (record["documents"], record["tokens"]) == (len(wanted), count)
    assert record["total_loss"] == pytest.approx(total, rel=1e-12)
    assert record["loss"] == pytest.approx(total / count, rel=1e-12)
    assert record["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(("stride", "batch"), [(CONTEXT, 8), (16, 3), (1, 64)])
def test_text(stride: int, batch: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(words, add_special_tokens=False) for words in TEXTS]
    limit = 2 if stride == 1 else len(TEXTS)
    words = ("--input", folder / "texts.jsonl", "--stride", stride, "--micro-batch-size", batch, "--limit", limit)
    record, lines = evaluated(folder, capsys, *words)
    check(record, lines, their_losses(ids[:limit], stride, END))
    assert max(len(document) for document in ids) > 3 * CONTEXT, "some document takes several windows"
    sizes = [len(words.encode()) for words in TEXTS[:limit]]
    assert [line["bytes"] for line in lines] == sizes and record["bytes"] == sum(sizes)
    assert record["bits_per_byte"] == pytest.approx(record["total_loss"] / math.log(2) / sum(sizes))
    assert (record["context"], record["stride"], record["prefix_id"]) == (CONTEXT, stride, END)
    assert [line["document"] for line in lines] == list(range(limit))


def test_pairs_and_prefixes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [[token for sequence in document for token in sequence] for document in PAIR]
    record, lines = evaluated(folder, capsys, "--data-path", folder / "pair", "--no-prefix")
    check(record, lines, their_losses(ids, CONTEXT, None))
    assert record["bits_per_byte"] is None and record["bytes"] is None
    assert record["prefix_id"] is None and "bytes" not in lines[0]
    record, lines = evaluated(folder, capsys, "--data-path", folder / "pair", "--prefix-id", 9, "--context", 20)
    assert record["tokens"] == sum(map(len, ids)) and record["context"] == record["stride"] == 20
    both, _ = evaluated(
        folder, capsys, "--data-path", folder / "pair", "--input", folder / "texts.jsonl", "--append-eod"
    )
    plain, _ = evaluated(folder, capsys, "--input", folder / "texts.jsonl")
    assert both["tokens"] == sum(map(len, ids)) + plain["tokens"] + len(TEXTS), "each text ends with its separator"
    assert both["bits_per_byte"] is None, "where the bytes of some are not known"


def test_first_tokens_that_are_not_scored_give_no_bits_per_byte(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, lines = evaluated(folder, capsys, "--input", folder / "texts.jsonl", "--no-prefix")
    assert record["bits_per_byte"] is None and record["bytes"] == sum(line["bytes"] for line in lines)


def on_rank(rank: int, size: int, tp: int, pp: int, folder: Path, words: list[object]) -> None:
    evaluate(arguments(folder, "--tp", tp, "--pp", pp, *words), build_grid(Axes(pp, size // (tp * pp), 1, tp)))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tp", "pp", "batch"), [(2, 2, 1, 1), (2, 1, 2, 5), (2, 1, 1, 2)])
def test_layouts(size: int, tp: int, pp: int, batch: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input", folder / "texts.jsonl", "--data-path", folder / "pair", "--stride", 30]
    _, wanted = evaluated(folder, capsys, *words)
    output = folder / f"scores-{size}-{tp}-{pp}.jsonl"
    run_ranks(size, on_rank, size, tp, pp, folder, [*words, "--micro-batch-size", batch, "--output", output])
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(found) == len(wanted)
    for line, right in zip(found, wanted, strict=True):
        losses = {"loss": 0, "total_loss": 0, "perplexity": 0}
        assert line | losses == right | losses
        assert line["total_loss"] == pytest.approx(right["total_loss"], rel=1e-12)


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    wrong: tuple[tuple[tuple[object, ...], list[str]], ...] = (
        ((), ["there is nothing to score"]),
        (("--data-path", "x", "--tp", 2), ["--tp 2 x --pp 1 = 2 ranks, but 1 process was started, no multiple of it"]),
        (("--data-path", "x", "--stride", 0, "--limit", -1), ["--stride 0: must be at least 1", "--limit -1"]),
        (("--data-path", "x", "--no-prefix", "--prefix-id", 3), ["exclude each other"]),
        (("--data-path", "x", "--output", tmp_path / "no" / "file"), ["there is no folder"]),
        (("--data-path", "x", "--output", tmp_path), ["is a folder; name a file in it"]),
    )
    for words, problems in wrong:
        with pytest.raises(ConfigError) as caught:
            check_flags(arguments(folder, *words), 1)
        assert all(problem in str(caught.value) for problem in problems)
    grid = single_process_grid()
    refused: tuple[tuple[tuple[object, ...], type[Exception], str], ...] = (
        (("--data-path", folder / "pair", "--context", 49), ConfigError, "the model has 48 learned positions"),
        (("--data-path", folder / "pair", "--context", 8, "--stride", 9), ConfigError, "tokens would be left out"),
        (("--data-path", folder / "pair", "--prefix-id", VOCABULARY), ConfigError, "vocabulary has 320 tokens"),
        (("--data-path", folder / "nothing"), DataError, "no file"),
    )
    for words, error, problem in refused:
        with pytest.raises(error, match=problem):
            evaluate(arguments(folder, *words), grid)
    write_pair(tmp_path / "large", [[[1, 2]], [[1, VOCABULARY]]])
    with pytest.raises(DataError, match=f"large, document 1: token {VOCABULARY} is not in the model's vocabulary"):
        evaluate(arguments(folder, "--data-path", tmp_path / "large"), grid)


def test_a_file_of_another_kind_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    """Such as the text that is scored. An earlier result is, and so is an empty file."""
    text, result = tmp_path / "notes.txt", tmp_path / "scores.jsonl"
    words = ("--data-path", folder / "pair", "--output")
    for content in ("Notes of a day.\n", '{"text": "a"}\n', "3\n"):
        text.write_text(content)
        with pytest.raises(ConfigError, match=f"--output {text}: is a file of another kind, which is not replaced"):
            check_flags(arguments(folder, *words, text), 1)
    result.touch()
    for _ in range(2):
        check_flags(arguments(folder, *words, result), 1)
        evaluate(arguments(folder, *words, result), single_process_grid())
    assert len(result.read_text().splitlines()) == len(PAIR) and text.read_text() == "3\n"


def test_what_is_no_file_is_written_into_and_a_link_stays(folder: Path, tmp_path: Path) -> None:
    """Moving a file to a device, which root may do, would take the device away."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for name in ("pipe", "link"):
            evaluate(
                arguments(folder, "--data-path", folder / "pair", "--output", tmp_path / name), single_process_grid()
            )
        told = os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and (tmp_path / "link").is_symlink()
    lines = told.splitlines()
    assert len(lines) == len(PAIR) and lines == (tmp_path / "target").read_bytes().splitlines()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_the_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(arguments(folder, "--input", folder / "texts.jsonl"), single_process_grid())
    out = capsys.readouterr().out
    assert "9 documents, " in out and f"context {CONTEXT}, stride {CONTEXT}, after token {END}" in out
    assert all(re.search(rf"{name} +[0-9.]+", out) for name in ("loss", "perplexity", "bits per byte", "total loss"))


@pytest.mark.slow
def test_a_closed_output_is_an_error(folder: Path) -> None:
    """As one of a full disk: the scores are what the command is for."""
    line = f"{sys.executable} -m megazero evaluate {folder} --data-path {folder / 'pair'} --limit 1 >&-"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("error: the standard output cannot be written: Bad file descriptor\n")
    assert done.returncode == 1


def test_bytes_that_are_no_utf8(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the error advises is a flag of this tool."""
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "utf8.txt").write_text("caf\N{REPLACEMENT CHARACTER}")
    with pytest.raises(DataError, match="--encoding-errors replace"):
        evaluated(folder, capsys, "--input", tmp_path / "latin.txt")
    replaced = evaluated(folder, capsys, "--input", tmp_path / "latin.txt", "--encoding-errors", "replace")[0]
    assert replaced["total_loss"] == evaluated(folder, capsys, "--input", tmp_path / "utf8.txt")[0]["total_loss"]


def test_nothing_to_score_is_an_error(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No result, which a program would take for one; and no file that looks whole."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "none.jsonl").write_text("")
    output = tmp_path / "scores.jsonl"
    for words, message in (
        (["empty.txt"], "the document that was named has no token that another stands before"),
        (["empty.txt", "empty.txt"], "none of the 2 documents named has a token that another stands before"),
        (["none.jsonl"], "there are no documents in what was named"),
    ):
        with pytest.raises(DataError, match=f"nothing was scored: {message}"):
            given = [tmp_path / word for word in words]
            evaluate(arguments(folder, "--json", "--output", output, "--input", *given), single_process_grid())
    assert capsys.readouterr().out == "" and not output.exists()


def test_an_output_that_cannot_be_written_is_told_before_the_scoring(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "left.unfinished").mkdir()
    for output, problem in (
        ("/proc/x", "--output /proc/x: /proc takes no folders"),
        (tmp_path / "left", "where lines are written first, is a folder"),
        (tmp_path / ("x" * 250), "has 261 bytes, and at most"),
        (tmp_path / ("x" * 300), "has 311 bytes, and at most"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_flags(arguments(folder, "--data-path", "x", "--output", output), 1)


def test_a_mistake_that_shows_once_the_model_is_open_has_status_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one message too, and leaves no file that looks whole."""
    output, pairs = folder / "never.jsonl", (folder / "pair", folder / "nothing")
    monkeypatch.setattr("megazero.launch.exit_now", sys.exit)
    monkeypatch.setattr("megazero.launch.launch", lambda *_: nullcontext(single_process_grid()))
    with pytest.raises(SystemExit) as ended:
        main(command_line(folder, "--data-path", *pairs, "--output", output))
    said = capsys.readouterr()
    assert ended.value.code == 2 and "1 problem" in said.err and "no file" in said.err and "Traceback" not in said.err
    assert said.out == "" and not output.exists()


def test_a_pair_of_another_tokenizer_is_refused_as_pretrain_refuses_it(folder: Path, tmp_path: Path) -> None:
    write_pair(tmp_path / "p", PAIR)
    model = open_model(folder, single_process_grid(), precision="fp64").tokenizer
    assert model is not None
    for tokenizer, kind in ((model, "hf"), (ByteTokenizer(), "byte")):
        path_of(tmp_path / "p").write_bytes(tokenizer_record(tokenizer, kind).written())
        told = r"p\.bin was made with another tokenizer \(byte of 257 tokens, hash \w+\) than the run has"
        with pytest.raises(DataError, match=told) if kind == "byte" else nullcontext():
            evaluate(arguments(folder, "--json", "--data-path", tmp_path / "p"), single_process_grid())
