"""The statuses of commands, as docs/reference/exit-status.md has them."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from megazero.cli.exit_status import status_of
from megazero.cli.main import main
from megazero.launch import Environment, exit_status
from megazero.system.unfinished import Ended

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/exit-status.md"


def raising(error: BaseException) -> Any:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "status", "told"),
    [
        (lambda: None, 0, ""),
        (lambda: 1, 1, ""),
        (raising(KeyError("x")), 2, "error: 'x'\n"),
        (raising(OverflowError("x")), 1, "error: x\n"),
        (raising(ImportError("no such package")), 1, "error: no such package\n"),
        (raising(OSError(errno.ENOSPC, "full")), 1, f"error: [Errno {errno.ENOSPC}] full\n"),
        (raising(KeyboardInterrupt()), 130, "stopped; nothing was written\n"),
        (raising(Ended(143)), 143, "stopped; nothing was written\n"),
        (raising(Ended(129)), 129, "stopped; nothing was written\n"),
        (raising(BrokenPipeError()), 141, ""),
    ],
)
def test_each_kind_of_end_has_its_status(work: Any, status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(work, (KeyError,), failures=(OverflowError,)) == status
    assert capsys.readouterr().err == told
    rows = re.findall(r"^\| (\d+) \|", PAGE.read_text().split("## Of every command")[1], re.MULTILINE)
    assert str(status) in rows and sorted(map(int, rows)) == [0, 1, 2, 129, 130, 141, 143]


def test_ctrl_c_in_a_rank_that_saves_nothing_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(raising(KeyboardInterrupt()), Environment(0, 0, 1, 1)) == 130
    assert capsys.readouterr().err == "interrupted\n"


BAD = (
    "pretrain --tp nothing",
    "prepare-data --input {folder}/none --output-prefix {folder}/x --tokenizer byte",
    "merge-data --input {folder}/none --output-prefix {folder}/x",
    "train-tokenizer --input {folder}/none --output {folder}/x",
    "inspect-data --data-path {folder}/none",
    "convert {folder}/none --to hf --output {folder}/x",
    "convert {folder}/text --to hf --output {folder}/x",
    "inspect {folder}/none",
    "inspect {folder}/text",
    "generate {folder}/none --prompt a",
    "generate {folder}/text --prompt a",
    "evaluate {folder}/none --input {folder}/text",
    "evaluate {folder}/text --input {folder}/text",
    "plan-schedule --iterations x",
    "draw-schedule --pp 0",
    "doctor --no-such-flag",
    "bench-nvme {folder}/none",
    "bench-nvme {folder} --share 0.5",
)


@pytest.mark.slow
@pytest.mark.parametrize("words", BAD)
def test_what_is_wrong_ends_with_2(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no checkpoint\n")
    ended: list[int] = []

    def leave(status: int) -> None:
        ended.append(status)
        raise SystemExit(status)

    monkeypatch.setattr("megazero.launch.exit_now", leave)
    monkeypatch.setattr("megazero.cli.training.exit_now", leave)
    monkeypatch.setattr("megazero.cli.pretrain.start_process", lambda argv: None)
    try:
        status: Any = main(words.format(folder=tmp_path).split())
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "") and said.err and "Traceback" not in said.err, said
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["text"]
