"""`megazero bench-nvme`: what it measures, says and leaves behind."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from megazero.cli import bench_nvme
from megazero.cli.bench_nvme import OPTIMIZER_BYTES, DiskSpeed, SpeedRow, count_of, estimate
from megazero.cli.main import main
from megazero.config.parse import parse_run
from megazero.disk import measure
from megazero.disk.backend import DiskOptions
from megazero.disk.errors import DiskError
from megazero.disk.measure import DiskTrial
from megazero.mpu.axes import Axes
from megazero.plan.bytes import stage_bytes

FIO = """#!/bin/sh
echo "$@" >> "$0.asked"
for word in "$@"; do case $word in --filename=*) touch "${word#--filename=}";; esac; done
echo 'fio: a note first'
echo '{"jobs": [{"read": {"bw_bytes": 3000000000}, "write": {"bw_bytes": 2000000000}}]}'
"""


def bench(folder: Path, *words: str) -> int:
    return main(["bench-nvme", str(folder), "--bytes", "64MiB", "--seconds", "1", *words])


@pytest.fixture(autouse=True)
def few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_nvme, "REQUESTS", (1 << 20, 2 << 20))
    monkeypatch.setattr(bench_nvme, "IN_FLIGHT", (1, 4))


@pytest.fixture
def without_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_nvme.shutil, "which", lambda name: None)


def test_the_table_marks_the_best_and_nothing_is_left(
    tmp_path: Path, without_fio: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "megazero-swap-trial-1-00000.bin").touch()  # of a measurement that was killed
    training = tmp_path / "megazero-swap-mine-00000.bin"
    training.touch()
    assert bench(tmp_path, "--parameters", "1.3B", "--share", "0.5") == 0
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}: ") and " with " in first
    assert head.split() == ["request", "in", "flight", "read", "GB/s", "write", "GB/s"]
    rows = [line.lstrip("* ").split() for line in lines[:5]]
    sizes = [["megazero", str(size), "MiB", str(depth)] for size in (1, 2) for depth in (1, 4)]
    assert [row[:4] for row in rows[:4]] == sizes and rows[4][:5] == ["plain", "loop", "4", "MiB", "1"]
    assert all(float(row[-1]) > 0 < float(row[-2]) for row in rows)
    assert sum(line.startswith("*") for line in lines) == 1
    assert "the state of 650,000,000 parameters here (bf16): 7.80 GB are read" in lines[7] and "TB a day" in lines[8]
    assert list(tmp_path.iterdir()) == [training]


def test_json_has_the_same_and_fio_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "disk"
    programs.mkdir()
    folder.mkdir()
    fio = programs / "fio"
    fio.write_text(FIO)
    fio.chmod(fio.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert bench(folder, "--json", "--parameters", "2e9", "--precision", "fp32", "--backend", "threads") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "threads with O_DIRECT (asked for)"
    speeds = [1 / (1 / row["read"] + 1 / row["write"]) for row in found["rows"]]
    assert len(speeds) == 4 and found["best"] == found["rows"][speeds.index(max(speeds))]
    assert [(row["way"], row["read"]) for row in found["others"]][1] == ("fio", 3e9)
    asked = (programs / "fio.asked").read_text().splitlines()
    best = f"--bs={found['best']['request_bytes']} --iodepth={found['best']['in_flight']} --size={1 << 26}"
    assert len(asked) == 2 and all(best in line and "--direct=1" in line for line in asked)
    assert "--rw=read" in asked[0] and "--rw=write" in asked[1] and "--end_fsync=1" in asked[1]
    assert found["step"]["bytes_each_way"] == 16_000_000_000
    assert list(folder.iterdir()) == []


def test_an_estimate_is_bytes_over_the_slower_lane() -> None:
    row = SpeedRow("megazero", 1 << 20, 2, 4e9, 3e9)
    speed = DiskSpeed("x", "y", [row], row, [], reads_beside=2e9, writes_beside=1.5e9)
    step = estimate(speed, parameters=10**9, share=0.25, state_bytes=12)
    assert (step.parameters, step.bytes_each_way, step.seconds) == (250_000_000, 3_000_000_000, 2.0)
    assert step.written_a_day == 1.5e9 * 86_400
    assert row.both_ways == pytest.approx(12 / 7 * 1e9)


@pytest.mark.parametrize("precision", OPTIMIZER_BYTES)
def test_bytes_of_a_parameter_are_the_plans(precision: str) -> None:
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --device cpu"
    (stage,) = stage_bytes(parse_run([*model.split(), "--precision", precision], 1), Axes(1, 1, 1, 1))
    assert stage.optimizer == OPTIMIZER_BYTES[precision] * stage.parameters


def test_numbers_of_parameters() -> None:
    assert {count_of(words) for words in ("1_300_000_000", "1.3e9", "1.3B")} == {1_300_000_000}
    assert [count_of(words) for words in ("350m", "20K")] == [350_000_000, 20_000]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--bytes 1MB", "--bytes: '1MB' is not at least 64MiB"),
        ("--seconds 0", "--seconds: '0' is not a number of seconds from 1 to 3600"),
        ("--parameters many", "--parameters: 'many' is not a number of parameters, such as 1.3e9 or 1.3B"),
        ("--parameters 1B --share 1.5", "--share: '1.5' is not a share above 0 and up to 1"),
        ("--precision fp32", "--precision fp32 goes with --parameters"),
        ("--backend aio", "--backend: 'aio' is not one of auto"),
    ],
)
def test_mistakes_are_one_line(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench-nvme", str(tmp_path), *words.split()])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-nvme", str(tmp_path), "--bytes", "500TB"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "500,000,000,00" in said and "bytes are needed" in said and "are free" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failure_in_the_middle_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DiskTrial, "plain_rate", interrupted)
    assert bench(tmp_path) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_rates_are_bytes_that_were_moved(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on a second whenever it is asked: four requests of 4 MiB in five seconds."""
    ticks = iter(range(1000))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    with DiskTrial(tmp_path, DiskOptions(1 << 20, 2, backend), 64 << 20, piece_bytes=4 << 20) as trial:
        trial.fill()
        for write in (False, True):
            (rate,) = trial.rates(write, seconds=1.5)
            assert rate == 4 * (4 << 20) / 5
        assert trial.plain_rate(True, 1 << 20, seconds=3.5) == 3 * (1 << 20) / 5


def test_a_trial_that_cannot_open_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise DiskError("no")

    monkeypatch.setattr(measure, "open_backend", refuse)
    with pytest.raises(DiskError):
        DiskTrial(tmp_path, DiskOptions(), 64 << 20)
    assert list(tmp_path.iterdir()) == []
