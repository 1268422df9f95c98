"""The command: its last line, its status, what the certificate says, and a check of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.cli.main import main
from megazero.mpu.axes import Axes
from megazero.mpu.parameter import StateGroup
from megazero.verify.certificate import code_hash

FLAGS = "--vocab-size 1001 --num-layers 2 --zero-stage 1".split()


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    """(status, lines, errors)."""
    status = main(["verify-layout", *words])
    told = capsys.readouterr()
    return status, told.out.splitlines(), told.err


def proven(capsys: pytest.CaptureFixture[str], path: Path, *more: str) -> tuple[int, list[str], dict[str, Any]]:
    status, lines, _ = command(capsys, "--world-size", "2", *FLAGS, *more, "--certificate", str(path))
    return status, lines, json.loads(path.read_text())


def test_a_certificate_and_its_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    status, lines, made = proven(capsys, path)
    assert status == 0 and lines[-1] == f"certificate: {path}" and "equal in" in lines[-2]
    assert made["result"] == "equal" and made["difference"] is None and made["failure"] is None
    assert made["flags"] == FLAGS and made["world_size"] == 2 and made["code"]["sha256"] == code_hash()
    assert made["roles"]["axes"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "shard": None}
    assert 0 < made["worst_relative_error"]["gradient"] < 1e-11 < made["tolerance"] == 1e-9
    assert made["small"]["settings"]["optimizer"]["precision"] == "fp64" and made["seed"] == 1234

    status, lines, _ = command(capsys, "--check", str(path))
    assert status == 0 and lines[-1] == f"{path} holds"
    for edit, keys in (
        ({"flags": [*FLAGS, "--zero-stage", "2"]}, "settings, small"),
        ({"roles": made["roles"] | {"ranks": 64}}, "roles"),
        ({"tolerance": 1e-3}, "tolerance"),
    ):
        path.write_text(json.dumps(made | edit))
        status, lines, _ = command(capsys, "--check", str(path))
        last = f"{path} does not hold: its {keys} do not follow from its flags and world_size"
        assert (status, lines[-1]) == (1, last)
    path.write_text(json.dumps(made | {"code": {"sha256": "0" * 64}}))
    status, lines, _ = command(capsys, "--check", str(path), "--certificate", str(tmp_path / "again.json"))
    assert status == 1 and lines[-1] == f"{path} does not hold: its code is another one"
    assert json.loads((tmp_path / "again.json").read_text())["result"] == "equal"


@pytest.mark.slow
def test_a_difference_is_the_last_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layout.json"
    _, _, sound = proven(capsys, path, "--pp", "2")
    path.write_text(json.dumps(sound))
    ranks = Axes.state_ranks
    monkeypatch.setattr(Axes, "state_ranks", lambda self, group, at: ranks(self, StateGroup.REPLICAS, at))
    status, lines, made = proven(capsys, tmp_path / "faulty.json", "--pp", "2")
    assert status == 1 and made["result"] == "differs" and made["difference"]["parameter"] == "embedding.word.weight"
    last = (
        "differs: the gradient of embedding.word.weight at reduce gradients (bucket 0), step 1 from the seed, on rank"
    )
    assert lines[-1].startswith(last) and "(stage" in lines[-1] and "relative error" in lines[-1]
    status, lines, _ = command(capsys, "--check", str(path))
    assert status == 1 and lines[-1].startswith(last)


def test_flags_that_take_no_part_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the terminal and in the certificate, in the same words."""
    status, lines, made = proven(capsys, tmp_path / "layout.json", "--lr-warmup-iters", "10", "--train-iters", "90")
    told = [line.removeprefix("not covered: ") for line in lines if line.startswith("not covered: ")]
    assert status == 0 and told == made["left_out"]
    assert [note.partition(":")[0] for note in told] == ["--precision bf16", "--lr-warmup-iters"]


def test_every_source_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_hash()
    assert before == code_hash() and len(before) == 64
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b" " * (self.name == "softmax.py"))
    assert code_hash() != before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--tp 2", "--world-size N is missing"),
        ("--tp 3 --num-attention-heads 4", "--tp 3 does not divide"),
        ("--world-size none", "--world-size none: a number of ranks"),
        ("--world-size 0", "--world-size 0: a number of ranks from 1"),
        ("--world-size 2 --ranks 4", "say different numbers of ranks"),
        ("--world-size 3 --tp 2", "does not divide the world size 3"),
        ("--world-size 2 --tpp 2", "--tpp"),
        ("--check", "--check is empty"),
        ("--check missing.json", "missing.json"),
        ("--check text.json", "text.json is no JSON"),
        ("--check other.json", "its format is 7"),
        ("--check list.json", "its format is list"),
        ("--check deep.json", "deep.json is no JSON"),
        ("--check help.json", "help.json: its flags ask for help"),
        ("--check both.json", "both.json says equal, and a difference or a failure as well"),
        ("--world-size 1 --certificate /proc/layout.json", "/proc/layout.json: its folder takes no file"),
        ("--check part.json", "lacks flags, world_size, result or the hash"),
        ("--check part.json --tp 2", "runs the flags of its certificate, and --tp 2 is given too"),
        ("--world-size 1 --certificate no/layout.json", "there is no such folder"),
        ("--world-size 1 --certificate=", "--certificate is empty"),
    ],
)
def test_what_cannot_be_run(
    words: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = {"format": 1, "flags": ["--help"], "world_size": 2, "result": "equal", "code": {"sha256": "0"}}
    files = {"text": "none", "other": '{"format": 7}', "list": "[]", "part": '{"format": 1}', "deep": "[" * 100_000}
    files |= {"help": json.dumps(whole), "both": json.dumps(whole | {"failure": "rank 3 has failed"})}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    status, lines, errors = command(capsys, *words.split())
    assert status == 2 and told in errors and not lines
    assert len(errors.splitlines()) <= 3


def test_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-layout", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--check FILE" in text and "Status 0: equal. 1: differs. 2: it cannot be run" in text


def test_a_certificate_replaces_certificates_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    status, lines, said = command(capsys, *FLAGS, "--world-size", "2", "--certificate", str(notes))
    assert (status, lines, notes.read_text()) == (2, [], "mine")
    assert f"--certificate {notes}: is there already and is no certificate; name another file" in said
