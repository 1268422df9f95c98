"""A run with model state in plain files: what is told before it starts, what it holds, and what goes wrong with it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.config.parse import parse_arguments, parse_run
from megazero.config.tiers import Tier
from megazero.disk.opening import open_swap
from megazero.disk.plain_files import PREFIX, PlainFiles, leftover_bytes, open_files
from megazero.disk.swap_file import DiskError, SwapDamaged, free_bytes
from megazero.mpu.axes import axes_of
from megazero.plan.rank_state import stage_bytes
from megazero.plan.step_lists import StageLists
from megazero.report.banner import schedule_lines
from megazero.report.run_report import gather
from megazero.telemetry.units import size
from megazero.train import checked
from megazero.train.checked import dry_run_text
from megazero.train.job import Job
from megazero.train.requirements import path_problems, room_problems, swap_bytes
from megazero.train.swap_files import backends
from tests.disks import small_disk
from tests.parity.training import data_flags, job_on_rank, small_model

MODEL = [*small_model(2, heads=4), "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "3"]
PARTS = ["--nvme-buffer-bytes", "400KB"]
STATE = 12
"""Bytes of master weight and moments of an element."""


def in_files(folder: Path, share: str = "files") -> list[str]:
    return ["--offload-optimizer", share, "--files-path", str(folder)]


def store_of(job: Job) -> PlainFiles:
    store = job.state.model.tiers.stores[Tier.FILES]
    assert isinstance(store, PlainFiles)
    return store


# --- before anything is started ------------------------------------------------------------------------------------


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, fault in {"absent": "there is no such folder", "file": "is no folder"}.items():
        run = parse_run([*MODEL, *in_files(tmp_path / name)], 1)
        assert path_problems(run.offload) == [f"--files-path {tmp_path / name}: {fault}"]


@pytest.mark.slow
def test_the_folder_has_room_for_the_ranks_of_a_host(tmp_path: Path) -> None:
    """The share that is offered has, and swap files do not count there."""
    with small_disk(tmp_path / "disk", 600 * 1024) as disk:
        (tmp_path / "swap").mkdir()
        more = ["--offload-params", "nvme", "--nvme-path", str(tmp_path / "swap")]
        run = parse_run([*MODEL, *in_files(disk), *more], 2)
        needed = swap_bytes(run, axes_of(run, 2), range(2), Tier.FILES)
        there = sum(stage.elsewhere.on(Tier.FILES) for stage in stage_bytes(run, axes_of(run, 2)))
        assert needed // 2 < 600 * 1024 < needed and 2 * there < needed < 2.2 * there
        assert room_problems(run, 2, range(1)) == []
        (problem,) = room_problems(run, 2, range(2))
        told = f"--files-path {disk}: the plain files of the 2 ranks here need {needed:,} bytes, and {600 * 1024:,} are"
        assert problem.startswith(f"{told} free; nearest: --offload-optimizer files:")
        assert problem.endswith(", or a folder with more room")
        (nearest,) = re.findall(r"files:[0-9.]+", problem)
        assert room_problems(parse_run([*MODEL, *in_files(disk, nearest), *more], 2), 2, range(2)) == []


@pytest.mark.slow
def test_swap_files_and_plain_files_share_the_room_of_a_file_system(tmp_path: Path) -> None:
    """Each of them has room there without the other. What a killed run has left is room for both."""
    with small_disk(tmp_path / "disk", 600 * 1024) as disk:
        for name in ("swap", "plain"):
            (disk / name).mkdir()
        words = [*MODEL, *in_files(disk / "plain"), "--offload-params", "nvme", "--nvme-path", str(disk / "swap")]
        run = parse_run(words, 1)
        plain, swap = (swap_bytes(run, axes_of(run, 1), range(1), tier) for tier in (Tier.FILES, Tier.DISK))
        assert max(plain, swap) < 590 * 1024 and room_problems(run, 1, range(1)) == []
        (disk / "other").write_bytes(bytes(600 * 1024 - max(plain, swap) - 8192))
        (problem,) = room_problems(run, 1, range(1))
        flags = f"--nvme-path {disk / 'swap'} and --files-path {disk / 'plain'} share a file system"
        assert problem.startswith(
            f"{flags}: {swap:,} bytes of swap files and {plain:,} bytes of plain files are needed"
        )
        (disk / "other").rename(disk / "swap" / "megazero-swap-killed-00000.bin")
        assert room_problems(run, 1, range(1)) == []


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from megazero.disk.plain_files import open_files
count = 300 * 1024
files = open_files([Path(sys.argv[1])], {"piece": count}, job="killed", rank=0)
files.write({"piece": torch.ones(count, dtype=torch.uint8)}).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_killed_run_has_left_counts_as_free(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 600 * 1024) as disk:
        run = parse_run([*MODEL, *in_files(disk)], 1)
        needed = swap_bytes(run, axes_of(run, 1), range(1), Tier.FILES)
        assert 300 * 1024 < needed < 600 * 1024
        subprocess.run([sys.executable, "-c", KILLED, str(disk)], check=False)
        assert free_bytes(disk) < needed and leftover_bytes(disk) >= 300 * 1024
        assert room_problems(run, 1, range(1)) == []


def test_what_is_told(corpus: Path, tmp_path: Path) -> None:
    """The bytes are those of the model's elements, and the step's."""
    elements = 1024 * 24 + 2 * (12 * 24**2 + 13 * 24) + 4 * 24
    words = [*MODEL, "--precision", "bf16", *in_files(tmp_path), "--offload-params", "nvme", "--nvme-path", "disk"]
    told = dict(schedule_lines(gather(StageLists(run := parse_run(words, 1), axes_of(run, 1), nccl=False))))
    state = f"of {size(STATE * elements)} of master weights and moments a rank has {size(STATE * elements)} in files"
    assert state in told["offload"] and f"a rank has {size(2 * elements)} on disks" in told["offload"]
    moved = f"a step reads {size(STATE * elements)} and writes {size(STATE * elements)}"
    assert told["files"] == f"{moved}; files are in {tmp_path}" and told["disks"].endswith("; files are in disk")
    flags = [*MODEL, *in_files(tmp_path), *data_flags(corpus, tmp_path / "cache"), "--validate-only"]
    answer = dry_run_text(parse_arguments(flags, 1), 1)
    assert "OK: " in answer and re.search(r"on its way +host memory +files$", answer, re.M)


def test_the_log_says_what_goes_where(tmp_path: Path) -> None:
    run = parse_run([*MODEL, *in_files(tmp_path), "--offload-params", "nvme", "--nvme-path", str(tmp_path)], 1)
    files = open_files([tmp_path], {"a": 4}, job="told", rank=0)
    space = open_swap([tmp_path], {"a": 4096}, job="told", slots=1)
    assert backends(run, {Tier.DISK: space, Tier.FILES: files}, None) == [
        f"--offload-params nvme: {space.backend}",
        f"--offload-optimizer files: plain files in {tmp_path}, by threads",
    ]
    space.close(remove=True)
    files.close(remove=True)
    assert [*tmp_path.iterdir()] == []


# --- the run -------------------------------------------------------------------------------------------------------


def test_a_rank_holds_what_the_plan_says(corpus: Path, tmp_path: Path) -> None:
    """Of state in files it holds slots alone, and the files take no more than the plan has room for."""
    (tmp_path / "files").mkdir()
    flags = [*MODEL, *PARTS, *in_files(tmp_path / "files"), *data_flags(corpus, tmp_path / "cache")]
    job, _ = job_on_rank(0, 1, [*flags, "--precision", "bf16"])
    (stage,) = stage_bytes(job.run, axes_of(job.run, 1))
    store, off, slots = store_of(job), stage.elsewhere, job.state.model.mover.nbytes
    pieces = [path for path in store.path.iterdir() if path.name.startswith("piece-")]
    assert off.on(Tier.FILES) == sum(off.optimizer) == store.file_bytes == sum(path.stat().st_size for path in pieces)
    assert job.state.model.bytes()["host memory"] == off.memory == off.slots == slots > 0 == off.host == off.buffers
    taken = sum(path.stat().st_blocks * 512 for path in pieces)
    assert taken <= off.files <= taken + 8192
    job.close()
    assert [*(tmp_path / "files").iterdir()] == []


def test_a_budget_of_host_memory_holds_what_does_not_rest_there(corpus: Path, tmp_path: Path) -> None:
    """It is too small for the state, and large enough for the slots."""
    model = [*MODEL, *PARTS, "--precision", "bf16", "--host-memory-budget", "450KB"]
    for words, fits in ((["--offload-optimizer", "cpu"], False), (in_files(tmp_path), True)):
        flags = [*model, *words, *data_flags(corpus, tmp_path / "cache"), "--validate-only"]
        try:
            assert "OK: " in dry_run_text(parse_arguments(flags, 1), 1) and fits
        except ValueError as error:
            assert not fits and "--host-memory-budget" in str(error)


def changed(store: PlainFiles) -> None:
    """One bit of the piece that is read first."""
    with (store.path / "piece-000000").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        (changed, SwapDamaged, "piece 'bucket 0, part 0' of .* bytes has the checksum .*; .* was written"),
        (
            lambda store: shutil.rmtree(store.path),
            DiskError,
            "piece-000000: reading piece .*: No such file or directory",
        ),
    ],
    ids=["a bit", "no folder"],
)
def test_a_fault_in_the_middle_is_one_clear_error(
    fault: Callable[[PlainFiles], None], kind: type[Exception], told: str, corpus: Path, tmp_path: Path
) -> None:
    flags = [*MODEL, *PARTS, *in_files(tmp_path), *data_flags(corpus, tmp_path / "cache")]
    job, _ = job_on_rank(0, 1, flags)
    taken = job.trainer.steps()
    next(taken)
    job.state.model.wait_parameters()
    fault(store_of(job))
    with pytest.raises(kind, match=f"{tmp_path}/{PREFIX}.*/.*{told}"):
        for _ in taken:
            pass
    job.close()
    assert not [*tmp_path.glob(f"{PREFIX}*")]


@pytest.mark.slow
def test_a_folder_that_gets_full_before_the_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the start has looked at may be gone: the first values are written before the first step."""
    monkeypatch.setattr(checked, "room_problems", lambda *_: [])
    with small_disk(tmp_path / "disk", 200 * 1024) as disk:
        flags = [*MODEL, *PARTS, *in_files(disk), *data_flags(corpus, tmp_path / "cache")]
        with pytest.raises(DiskError, match=f"{disk}/{PREFIX}.*: writing piece .*: the disk is full: No space left"):
            job_on_rank(0, 1, flags)
        assert [*disk.iterdir()] == []
