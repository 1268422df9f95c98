"""A conversion from start to end, and the tool."""

from __future__ import annotations

import fcntl
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.native import FORMAT, open_native
from megazero.convert.registry import format_table
from megazero.convert.report import ConversionReport, Disagreement
from megazero.convert.source import ConversionError
from megazero.convert.verification import verify
from megazero.data.progress import silent
from tests.convert.sources import Made, made

ROOT = Path(__file__).resolve().parents[2]


def test_whole_or_not_at_all(tmp_path):
    source = made()

    class Breaks(Made):
        def read(self, name, column="weight"):
            if name == "head.norm.bias":
                raise OSError(5, "the disk is gone")
            return super().read(name, column)

    broken = Breaks(source.format, source.path, source.run, source.entries, source.position)
    with pytest.raises(OSError, match="gone"):
        convert(broken, FORMAT, tmp_path / "out", TargetOptions(), silent)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.converting").mkdir()  # as a killed conversion leaves it
    (tmp_path / ".out.converting" / "half").write_text("x")
    convert(source, FORMAT, tmp_path / "out", TargetOptions(), silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["iter_0000007", "latest"]


def test_everything_that_speaks_against_it_is_said_at_once(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ConversionError) as said:
        convert(made(), FORMAT, tmp_path / "out", TargetOptions(tp=2, dp=3), silent)
    for part in ("no layout", "--dp 3", "nothing is overwritten"):
        assert part in str(said.value)
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_a_place_that_takes_no_folder_is_said_before(tmp_path):
    with pytest.raises(ConversionError, match="--output /proc/x: /proc takes no folders") as said:
        convert(made(), FORMAT, Path("/proc/x"), TargetOptions(), silent)
    assert "GB" not in str(said.value)
    with pytest.raises(ConversionError, match="and at most 255 can be written"):
        convert(made(), FORMAT, tmp_path / ("x" * 300), TargetOptions(), silent)


def test_nothing_is_written_into_a_run_or_a_checkpoint(tmp_path):
    """What trims or copies a run would take it for a part of it."""
    convert(made(), FORMAT, tmp_path / "run", TargetOptions(), silent)
    shutil.copytree(tmp_path / "run" / "iter_0000007", tmp_path / "best")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run_token").write_text("x")
    for place in ("run/sub", "run/sub/deeper", "run/iter_0000007/sub", "best/sub", "begun/sub"):
        with pytest.raises(ConversionError, match=f"--output {tmp_path}/{place}: {tmp_path}/.* is a folder of a run's"):
            convert(made(), FORMAT, tmp_path / place, TargetOptions(), silent)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["iter_0000007", "latest"]
    convert(made(), FORMAT, tmp_path / "run-hf", TargetOptions(), silent)


def test_a_full_disk_is_known_before(tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.convert.convert.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConversionError, match="free there"):
        convert(made(), FORMAT, tmp_path / "out", TargetOptions(), silent)


def test_two_conversions_do_not_write_into_each_other(tmp_path):
    with open(tmp_path / ".out.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another conversion"):
            convert(made(), FORMAT, tmp_path / "out", TargetOptions(), silent)


def test_verification_sees_one_wrong_bit(tmp_path):
    source = made(moments=True)
    convert(source, FORMAT, tmp_path / "out", TargetOptions(), silent)
    good = verify(source, tmp_path / "out", "megazero", silent)
    assert good.holds and "87 tensors bit-equal" in good.lines[0] and "logits of 32 positions" in good.lines[1]

    class Wrong(Made):
        def read(self, name, column="weight"):
            values = super().read(name, column)
            if (name, column) == ("head.norm.bias", "exp_avg"):
                values.view(torch.uint8)[0] ^= 1
            return values

    other = Wrong(source.format, source.path, source.run, source.entries, source.position)
    bad = verify(other, tmp_path / "out", "megazero", silent)
    assert not bad.holds and "head.norm.bias exp_avg" in bad.lines[0]


def test_the_report_names_what_is_out_of_the_ordinary():
    report = ConversionReport(
        mapped=["a", "b"],
        unused={"h.0.attn.bias": "a mask"},
        filled={"x": "zeros"},
        replicas=[Disagreement("n", 4, 0.5)],
    )
    text = "\n".join(report.lines())
    for part in (
        "keys mapped        2",
        "h.0.attn.bias (a mask)",
        "x (zeros)",
        "n: 4 copies averaged, largest distance 0.5",
    ):
        assert part in text


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/convert_checkpoint.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_tool(tmp_path):
    convert(made(moments=True), FORMAT, tmp_path / "in", TargetOptions(), silent)
    done = tool(
        "--input", f"{tmp_path}/in", "--to", "megazero", "--output", f"{tmp_path}/out", "--dtype", "bf16", "--verify"
    )
    assert done.returncode == 0, done.stderr
    assert "bit-equal" in done.stdout and "keys unused        0" in done.stdout and "MB" in done.stderr
    with open_native(tmp_path / "out") as read:
        assert read.entries["head.norm.bias"].columns["weight"] == torch.bfloat16
    again = tool("--input", f"{tmp_path}/nothing", "--to", "megazero", "--output", f"{tmp_path}/out")
    assert again.returncode == 2 and "Traceback" not in again.stderr and f"{tmp_path}/nothing" in again.stderr


def test_an_output_that_is_a_link_leads_on(tmp_path):
    (tmp_path / "there").mkdir()
    for name, target in (("to-empty", "there"), ("to-nothing", "not-yet")):
        (tmp_path / name).symlink_to(target)
        convert(made(), FORMAT, tmp_path / name, TargetOptions(), silent)
        assert (tmp_path / name).is_symlink() and (tmp_path / target / "latest").is_file()


def test_an_output_below_a_file_and_no_ranks_are_said_before(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConversionError, match=r"--dp 0: must be at least 1.*file is a file"):
        convert(made(), FORMAT, tmp_path / "file" / "a" / "b", TargetOptions(dp=0), silent)


@pytest.mark.parametrize(("to", "sizes"), [("megazero", {"tp": 0}), ("megatron", {"tp": 0, "pp": -1, "dp": 0})])
def test_a_size_below_one_is_one_message(to: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConversionError) as caught:
        convert(made(), format_table()[to], tmp_path / "x", replace(TargetOptions(), **sizes), silent)
    assert str(caught.value) == "; ".join(f"--{axis} {size}: must be at least 1" for axis, size in sizes.items())


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--input", "nowhere"], "nowhere: there is no such checkpoint"), (["--vocab-size", "0"], "--vocab-size 0")],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, flags, said):
    convert(made(), FORMAT, tmp_path / "in", TargetOptions(), silent)
    monkeypatch.setattr(
        sys, "argv", ["convert_checkpoint.py", "--input", str(tmp_path / "in"), "--to", "hf", "--output", "x", *flags]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
