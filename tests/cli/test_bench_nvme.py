"""`megazero bench-nvme`: what it measures, says and leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor

from megazero.cli import bench_nvme
from megazero.cli.bench_nvme import FIO, OPTIMIZER_BYTES, DiskSpeed, count_of, estimate, sentences
from megazero.cli.main import main
from megazero.config.parse import parse_run
from megazero.config.tiers import Tier
from megazero.disk import measure, swap
from megazero.disk.measure import DiskTrial
from megazero.disk.swap_file import DiskError
from megazero.disk.transports import DiskOptions
from megazero.mpu.axes import Axes
from megazero.plan.rank_state import RankState, stage_bytes
from megazero.plan.step_times import NEEDED, read_rates

WITHOUT_RINGS = "--ioengine=libaio"
AXES = Axes(1, 1, 1, 1)

MODEL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --device cpu"


def bench(folder: Path, *words: str) -> int:
    return main(["bench-nvme", str(folder), "--bytes", "64MiB", "--seconds", "1", *words])


def test_it_says_what_a_step_reaches_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "megazero-swap-trial-1-00000.bin").touch()  # of a measurement that was killed
    training = tmp_path / "megazero-swap-mine-00000.bin"
    training.touch()
    assert bench(tmp_path, "--parameters", "1.3B", "--share", "0.5") == 0
    backend, step, _, read, write, *estimated = capsys.readouterr().out.splitlines()
    assert backend.startswith(f"{tmp_path}: ") and " with " in backend
    assert step.startswith("a step (bf16): ") and " GB/s are read and as many written, in parts of 4.2 MB; for " in step
    assert read.startswith("read: ") and write.startswith("write: ")
    assert "the state of 650,000,000 parameters here (bf16): 7.80 GB are read" in estimated[0]
    assert "TB a day" in estimated[1]
    assert list(tmp_path.iterdir()) == [training]


def test_its_rates_are_lines_of_a_file_for_a_placement(tmp_path: Path) -> None:
    speed = DiskSpeed("x", "y", 1 << 20, each_way=1e9, updating=0.5, read=1.2345e9, write=5.1e7)
    others = [f"{name}: 1e9" for name in NEEDED]
    (tmp_path / "rates.yaml").write_text("\n".join([*others, *list(sentences(speed, "bf16"))[-2:]]))
    rates = read_rates(str(tmp_path / "rates.yaml"))
    assert (rates.read, rates.write) == (1.23e9, 5.1e7)


@pytest.mark.parametrize("precision", OPTIMIZER_BYTES)
def test_json_has_the_same(precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--json", "--parameters", "2e9", "--precision", precision) == 0
    speed = json.loads(capsys.readouterr().out)
    assert min(speed[rate] for rate in ("each_way", "read", "write")) > 0 and 0 < speed["updating"] < 1
    assert speed["step"]["bytes_each_way"] == 2_000_000_000 * OPTIMIZER_BYTES[precision]
    assert list(tmp_path.iterdir()) == []


def test_an_estimate_is_bytes_over_what_a_step_reaches() -> None:
    speed = DiskSpeed("x", "y", 1 << 20, each_way=1.5e9, updating=0.5, read=4e9, write=3e9)
    step = estimate(speed, parameters=10**9, share=0.25, state_bytes=12)
    assert (step.parameters, step.bytes_each_way, step.seconds) == (250_000_000, 3_000_000_000, 2.0)
    assert step.written_a_day == 1.5e9 * 86_400


@pytest.mark.parametrize("precision", OPTIMIZER_BYTES)
def test_parts_are_as_large_as_those_of_a_run(precision: str) -> None:
    """Which cuts a bucket into equal parts of at most so many bytes."""
    flags = "--num-layers 1 --hidden-size 1024 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --device cpu"
    words = [*flags.split(), "--precision", precision, "--offload-optimizer", "nvme", "--nvme-path", "."]
    largest = max(RankState(parse_run(words, 1), AXES, AXES.coordinates(0), nccl=False).pieces[Tier.DISK].values())
    assert 0.8 < largest / bench_nvme._part_bytes(precision) <= 1.0


@pytest.mark.parametrize("rw", ["read", "write --end_fsync=1", "rw", f"read {WITHOUT_RINGS}"])
def test_fio_as_the_docs_have_it(rw: str, tmp_path: Path) -> None:
    """With megazero's requests, and smaller and shorter than the docs say."""
    page = (Path(__file__).parents[2] / "docs/how-it-works/disk.md").read_text()
    assert FIO in page and all(f"`{flags}`" in page for flags in ("--rw=rw", "--rw=write --end_fsync=1", WITHOUT_RINGS))
    assert FIO.split("bs=")[1].split()[0] == f"{DiskOptions().direct_bytes >> 20}m"
    assert FIO.split("iodepth=")[1].split()[0] == str(DiskOptions().depth)
    if shutil.which("fio") is None:
        pytest.skip("there is no fio")
    command = FIO.replace("PATH", str(tmp_path)).replace("=4g", "=64m").replace("--runtime=10", "--runtime=1")
    subprocess.run(command.replace("--rw=read", f"--rw={rw}").split(), check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", OPTIMIZER_BYTES)
def test_bytes_of_a_parameter_are_the_plans(precision: str) -> None:
    (stage,) = stage_bytes(parse_run([*MODEL.split(), "--precision", precision], 1), AXES)
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
        ("--share 0.5", "--share 0.5 goes with --parameters"),
        ("--precision fp8", "--precision: 'fp8' is not one of bf16"),
        (
            "--backend threads",
            "--backend: is gone, because a training cannot choose how bytes are moved; the first line",
        ),
    ],
)
def test_mistakes_are_one_line(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench-nvme", str(tmp_path), *words.split()])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-nvme", str(tmp_path), "--bytes", "500TB"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "499,999," in said and "bytes are needed" in said and "are free" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failure_in_the_middle_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DiskTrial, "rates", interrupted)
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


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_a_step_updates_every_piece_where_it_lies(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than once, and no update is lost: a piece that was read again has what was written. By a clock that
    goes on a second whenever it is asked, which is three times a piece: a busy machine updates as many.
    """
    updates, ticks = list[int](), iter(range(10_000))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))

    def count_up(memory: Tensor) -> None:
        memory.add_(1)
        updates.append(int(memory[-1]))

    with DiskTrial(tmp_path, DiskOptions(1 << 20, 2, backend), 64 << 20, piece_bytes=4 << 20) as trial:
        trial.fill()
        step = trial.step(count_up, seconds=200.0)
    first, pieces = updates[0], 16
    assert len(updates) > 2 * pieces and step.rate > 0 < step.updating < 1
    assert updates == [(first + number // pieces) % 256 for number in range(len(updates))]


def test_a_trial_that_cannot_open_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise DiskError("no")

    monkeypatch.setattr(swap, "open_backend", refuse)
    with pytest.raises(DiskError):
        DiskTrial(tmp_path, DiskOptions(), 64 << 20)
    assert list(tmp_path.iterdir()) == []
