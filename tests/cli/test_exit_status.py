"""The statuses of commands, as docs/reference/exit-status.md has them."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.cli.exit_status import status_of
from megazero.cli.main import main
from megazero.convert.formats import TargetOptions
from megazero.convert.native import write_native
from megazero.launch import exit_status
from megazero.mpu.meeting import Environment
from megazero.system.unfinished import Ended
from tests.convert.sources import made
from tests.data.pairs import write_pair

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
    "export {folder}/none {folder}/x",
    "export {folder}/text {folder}/x",
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
    monkeypatch.setattr("megazero.cli.pretrain.start_process", lambda argv: None)
    try:
        status: Any = main(words.format(folder=tmp_path).split())
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "") and said.err and "Traceback" not in said.err, said
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["text"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small model in three formats, and a pair of data."""
    folder = tmp_path_factory.mktemp("whole")
    write_native(made(), folder / "native", TargetOptions(), lambda count: None)
    for format in ("hf", "consolidated"):
        assert main(["convert", str(folder / "native"), "--to", format, "--output", str(folder / format)]) == 0
    write_pair(folder / "pair", [100, 100], vocab_size=50)
    return folder


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 9 // 10] ^= 0xFF
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "native/**/fragments-*": (flipped, cut),
    "native/**/manifest.json": (flipped, cut),
    "hf/*.safetensors": (cut,),
    "consolidated/pytorch_model.bin": (cut,),
}
"""Files of a checkpoint -> what happens to them."""
OPENING = {
    "generate": "{model} --ids --prompt 1",
    "evaluate": "{model} --data-path {folder}/pair",
    "convert": "{model} --to megazero --output {folder}/out",
    "inspect": "{model} --verify",
    "pretrain": "--init-from {model} --data-path {folder}/pair",
    "pretrain --load": "{model} --data-path {folder}/pair --vocab-size 50",
}
"""Commands that open a checkpoint, and their other words. No run goes on from another program's format."""
AT_THE_LOAD = {("pretrain", flipped), ("pretrain --load", flipped), ("pretrain --load", cut)}
"""Damage of weights that a training finds after its check, with a traceback."""
TO_OPEN = [
    (command, files, harm)
    for files, harms in DAMAGE.items()
    for harm in harms
    for command in OPENING
    if not ("--load" in command and not files.startswith("native"))
    if not ("fragments" in files and (command, harm) in AT_THE_LOAD)
]
"""Commands, damaged files and harms that a command's check finds."""


@pytest.mark.slow
@pytest.mark.parametrize(("command", "files", "harm"), TO_OPEN)
def test_a_damaged_checkpoint_ends_every_command_with_1(
    command: str,
    files: str,
    harm: Callable[[Path], None],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, name = tmp_path / "copy", files.partition("/")[0]
    shutil.copytree(whole, folder)
    (file,) = folder.glob(files)
    harm(file)

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("megazero.launch.exit_now", leave)
    monkeypatch.setattr("megazero.cli.pretrain.start_process", lambda argv: None)
    try:
        status: Any = main(f"{command} {OPENING[command]}".format(model=folder / name, folder=folder).split())
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 1 and "Traceback" not in said and "in the configuration" not in said, said
    assert file.name in said
