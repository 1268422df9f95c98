"""Optimizer state off the device, from the start of a run to its report: folders, room, failures, what is told."""

from __future__ import annotations

import fcntl
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megazero.config.parse import ConfigError, parse_run
from megazero.config.tiers import Tier
from megazero.disk.opening import open_swap
from megazero.disk.swap_file import DiskError
from megazero.mpu.axes import Coordinates, axes_of
from megazero.plan.rank_state import RankState, stage_bytes
from megazero.plan.step_lists import StageLists
from megazero.plan.traffic import moved_in_step
from megazero.program.instruction import Lane
from megazero.report.banner import schedule_lines, stage_table
from megazero.report.run_report import gather
from megazero.telemetry.units import size
from megazero.train import job as jobs
from megazero.train import requirements, swap_files
from megazero.train.requirements import budget_problems, folder_problems, room_problems, swap_bytes
from megazero.train.swap_files import written_sentence
from tests.disks import remount, small_disk
from tests.parameters import values_of
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks
from tests.train.starts import problems_at_start

MODEL = [*small_model(2, heads=4), "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "3"]
PARTS = ["--nvme-buffer-bytes", "400KB"]


def on_disk(*folders: Path | str, share: str = "nvme") -> list[str]:
    return ["--offload-optimizer", share, "--nvme-path", *map(str, folders)]


# --- before anything is started ------------------------------------------------------------------------------------


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with small_disk(tmp_path / "disk", 2**20) as disk:
        assert folder_problems([str(disk)]) == []
        remount(disk, "ro")
        folders = [str(tmp_path / "absent"), str(tmp_path / "file"), str(disk)]
        found = folder_problems(folders)
        run = parse_run([*MODEL, *on_disk(*folders)], 1)
        assert [problem for problem in problems_at_start(run) if "--nvme-path" in problem] == found
    assert found == [
        f"--nvme-path {tmp_path}/absent: there is no such folder",
        f"--nvme-path {tmp_path}/file: is no folder",
        f"--nvme-path {disk}: may not be written in",
    ]


def test_the_ranks_of_a_host_need_room_for_all_of_them(tmp_path: Path) -> None:
    """One of two ranks fits, in one folder or two of one disk; two do not, and the share that is offered does."""
    with small_disk(tmp_path / "disk", 900 * 1024) as disk:
        (disk / "more").mkdir()
        for folders in ([disk], [disk, disk / "more"]):
            run = parse_run([*MODEL, *on_disk(*folders)], 2)
            needed, free = swap_bytes(run, axes_of(run, 2), range(2)), 900 * 1024
            assert needed // 2 < free < needed
            assert room_problems(run, 2, range(1, 2)) == []
            (problem,) = room_problems(run, 2, range(2))
            assert f"the 2 ranks here need {needed:,} bytes, and {free:,} are free" in problem
            nearest = re.findall(r"nvme:[0-9.]+", problem)
            assert room_problems(parse_run([*MODEL, *on_disk(*folders, share=nearest[0])], 2), 2, range(2)) == []


@pytest.mark.parametrize(
    "words",
    [
        "--offload-params nvme",
        "--offload-params nvme --offload-optimizer nvme:0.4",
        "--offload-params nvme:0.8 --offload-optimizer nvme --zero-stage 3",
        "--offload-optimizer nvme:0.9 --offload-params cpu",
    ],
)
def test_the_shares_that_are_offered_fit(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters leave by whole buckets: so bytes do not grow evenly with their share."""
    model, offered = [*MODEL, "--nvme-path", str(tmp_path)], 0
    run = parse_run([*model, *words.split()], 2)
    needed = swap_bytes(run, axes_of(run, 2), range(2))
    for part in (0.03, 0.2, 0.4, 0.6, 0.8, 0.97):
        monkeypatch.setattr(requirements, "free_on", lambda offload, used, free=int(part * needed): free)
        (problem,) = room_problems(run, 2, range(2))
        nearest = " ".join(re.findall(r"--offload-[a-z]+ nvme:[0-9.]+", problem)).split()
        if nearest:
            offered += 1
            assert room_problems(parse_run([*model, *words.split(), *nearest], 2), 2, range(2)) == []
    assert offered > 0


def test_files_of_ended_processes_count_as_free(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 900 * 1024) as disk:
        run, left = parse_run([*MODEL, *on_disk(disk)], 1), disk / "megazero-swap-killed-00000.bin"
        left.write_bytes(bytes(700 * 1024))
        assert room_problems(run, 1, range(1)) == []
        with left.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "and 204,800 are free" in room_problems(run, 1, range(1))[0]


ACTIVATIONS = ["--num-layers", "8", "--offload-activations", "nvme"]


def test_activations_need_room_too(tmp_path: Path) -> None:
    """In buffers, four of which hold what the largest unit keeps, and in files, beside those of the optimizer."""
    for words, most in (("--seq-length 512", 100), ("--seq-length 512 --offload-optimizer nvme", 100)):
        flags = [*MODEL, *ACTIVATIONS, "--nvme-path", str(tmp_path), *words.split()]
        run = parse_run([*flags, "--nvme-buffer-bytes", "1MB"], 1)
        axes = axes_of(run, 1)
        (problem,) = budget_problems(run, 1, tries_cards=True)
        assert "--nvme-buffer-bytes 1000000 does not hold 4 times what a unit of the model keeps" in problem
        nearest = problem.split("nearest: --nvme-buffer-bytes ")[1]
        fits = parse_run([*flags, "--nvme-buffer-bytes", nearest], 1)
        assert budget_problems(fits, 1, tries_cards=True) == []
        found = StageLists(fits, axes, nccl=False).activations(0)
        assert found.count and found.buffer_bytes <= int(nearest) // 4
        with small_disk(tmp_path / f"disk{len(words)}", most * 4096) as disk:
            there = parse_run([*flags, "--nvme-buffer-bytes", nearest, "--nvme-path", str(disk)], 1)
            (problem,) = room_problems(there, 1, range(1))
            needed = swap_bytes(there, axes, range(1))
            rest = needed - found.files
            assert f"need {needed:,} bytes" in problem and problem.endswith("a folder more, on another disk")
            assert (rest > 0) == ("--offload-optimizer" in words)


# --- a failure on one rank -----------------------------------------------------------------------------------------


def opened_or_not(rank: int, world: int, flags: list[str], folder: Path, broken: Sequence[int]) -> tuple[str, int]:
    """The problem with which the job's start ends, and the number of files that are left then."""

    def fails(*args: object, **more: object) -> object:
        raise DiskError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        if rank in broken:
            patch.setattr(swap_files, "open_swap", fails)
        elif not broken:
            patch.setattr(jobs, "resume", fails)
        with pytest.raises((ConfigError, DiskError)) as raised:
            job_on_rank(rank, world, flags)
    return f"{type(raised.value).__name__}: {raised.value}", len(list(folder.glob("*megazero*")))


def test_a_disk_that_fails_one_rank_is_a_wrong_configuration_on_all(corpus: Path, tmp_path: Path) -> None:
    """And nothing stays in the folders."""
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = [*MODEL, *on_disk(disk), *data_flags(corpus, tmp_path / "cache")]
    for told, _ in run_ranks(2, opened_or_not, 2, flags, disk, (1,)):
        assert told.startswith("ConfigError") and f"--nvme-path {disk}: " in told and "the disk is full" in told
    assert list(disk.iterdir()) == []
    for told, left in run_ranks(1, opened_or_not, 1, flags, disk, ()):
        assert (told, left) == ("DiskError: the disk is full", 0)


# --- the run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu:0.7", "nvme"])
def test_sgd_is_the_same(where: str, corpus: Path, tmp_path: Path) -> None:
    """To the bit. It has no second moment, there or here."""
    more = ["--precision", "bf16", "--optimizer", "sgd", "--lr", "0.1"]
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), *more]
    found = []
    for more in ([], [*on_disk(tmp_path, share=where), *PARTS] if where == "nvme" else ["--offload-optimizer", where]):
        job, recorder = job_on_rank(0, 1, [*flags, *more])
        parts = sum(len(rests.parts) for rests in job.state.model.resting)
        job.fit()
        found.append((parts, [record.loss for record in recorder.records], values_of(nn.ModuleList(job.stages))))
    (none, losses, weights), (some, other_losses, other_weights) = found
    assert none == 0 < some and losses == other_losses and losses[0] != losses[-1]
    assert all(torch.equal(a.values, b.values) for a, b in zip(weights, other_weights, strict=True))


def test_the_report_counts_what_the_disk_has(corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *PARTS, *on_disk(tmp_path), *data_flags(corpus, tmp_path / "cache")]
    job, _ = job_on_rank(0, 1, flags)
    steps = StageLists(job.run, job.grid.axes, nccl=False)
    told = dict(schedule_lines(gather(steps)))["disks"]
    job.fit()
    swap = job.state.model.tiers.swap
    assert swap is not None
    state = sum(part.state_bytes for bucket in steps.of(0).shape.buckets for part in bucket.parts)
    assert told == f"a step reads {size(state)} and writes {size(state)}; files are in {tmp_path}"
    assert 3 * state <= job.disks.written <= 1.05 * 3 * state, "in pages"
    assert job.disks.sentence(job.grid).startswith(f"{size(job.disks.written)} written to disks, which is ")
    job.close()
    assert not list(tmp_path.glob("*swap*"))


def test_activations_on_disks_are_counted_and_told(corpus: Path, tmp_path: Path) -> None:
    """What a step writes, by the banner, is what the run has written; the files are gone at the end."""
    flags = [*MODEL, *ACTIVATIONS, "--nvme-path", str(tmp_path), *data_flags(corpus, tmp_path / "cache")]
    job, _ = job_on_rank(0, 1, flags)
    steps = StageLists(job.run, job.grid.axes, nccl=False)
    told, found = dict(schedule_lines(gather(steps)))["activations"], steps.activations(0)
    job.fit()
    assert told.endswith(
        f"of host memory to {size(found.files)} of files on a rank; a step writes {size(found.step_bytes)} "
        "there and reads as much"
    )
    assert job.disks.written == 3 * found.step_bytes > 0
    assert job.disks.sentence(job.grid).startswith(f"{size(job.disks.written)} written to disks, which is ")
    job.close()
    assert not list(tmp_path.glob("*swap*"))


@pytest.mark.parametrize(
    "words",
    [
        "--offload-params cpu",
        "--offload-params cpu:0.5 --offload-optimizer nvme:0.5 --late-update",
        "--offload-params nvme",
        "--offload-params nvme --offload-optimizer cpu:0.5 --global-batch-size 3",
        "--offload-params nvme --offload-optimizer nvme --zero3-regather step --zero3-gathered-bytes 1MB",
    ],
)
def test_a_step_moves_what_the_banner_says(words: str, corpus: Path, tmp_path: Path) -> None:
    disk = ["--nvme-path", str(tmp_path), *PARTS] if "nvme" in words else []
    flags = [*MODEL, *words.split(), *disk, "--precision", "bf16", *data_flags(corpus, tmp_path / "cache")]
    job, _ = job_on_rank(0, 1, flags)
    own = StageLists(job.run, job.grid.axes, nccl=False).of(0)
    model, counted, taken = job.state.model, Counter[Lane](), job.trainer.steps()
    next(taken)  # a late update belongs to the step behind its own

    def count(where: object, name: str, lane: Lane, bytes_of: Callable[..., int]) -> None:
        plain = getattr(where, name)

        def counting(*rest: Any, **more: Any) -> object:
            counted[lane] += bytes_of(*rest)
            return plain(*rest, **more)

        setattr(where, name, counting)

    count(model.tiers.to_host, "copy", Lane.TO_HOST, lambda target, source, *_: target.nbytes)
    count(model.tiers.to_device, "copy", Lane.TO_DEVICE, lambda target, source, *_: target.nbytes)
    for name, lane in {"read": Lane.FROM_DISK, "write": Lane.TO_DISK}.items() if disk else ():
        count(model.tiers.swap, name, lane, lambda tensors: sum(tensor.nbytes for tensor in tensors.values()))
    next(taken)
    moved = moved_in_step(own.instructions, own.shape)
    assert counted == Counter({lane: moved[lane] for lane in moved if lane is not Lane.HOST})
    # What an update in host memory exchanges with the device is no copy on a CPU.
    assert counted[Lane.TO_DEVICE] > 0 and (counted[Lane.TO_HOST] > 0) is ("--offload-optimizer nvme " not in words)
    job.close()


def test_the_log_names_what_moves_to_disks(tmp_path: Path) -> None:
    model = [*MODEL, "--nvme-path", str(tmp_path)]
    for words, flags in {
        "--offload-params nvme:0.5 --offload-optimizer cpu": "--offload-params nvme:0.5",
        "--offload-optimizer nvme": "--offload-optimizer nvme",
        "--offload-params nvme --offload-optimizer nvme": "--offload-optimizer nvme --offload-params nvme",
    }.items():
        space = open_swap([tmp_path], {"a": 4096}, job="told", slots=1)
        told = swap_files.backends(parse_run([*model, *words.split()], 1), {Tier.DISK: space}, None)
        assert told == [f"{flags}: {space.backend}"]
        space.close(remove=True)


def test_what_is_told() -> None:
    def said(words: str, ranks: int) -> dict[str, str]:
        run = parse_run([*MODEL, "--precision", "bf16", *words.split()], ranks)
        return dict(schedule_lines(gather(StageLists(run, axes_of(run, ranks), nccl=False))))

    assert not {"offload", "disks"} & {*said("", 1)}
    whole = said("--offload-optimizer cpu --device cuda", 1)
    elements = 1024 * 24 + 2 * (12 * 24**2 + 13 * 24) + 4 * 24
    assert (
        f"of {size(12 * elements)} of master weights and moments a rank has {size(12 * elements)} in host"
        in (whole["offload"])
    )
    assert f"copies {size(4 * elements)} to the host and {size(2 * elements)} to the device" in whole["offload"]
    assert "disks" not in whole
    both = said("--offload-optimizer nvme:0.5 --nvme-path a b --pp 2 --zero-stage 1", 4)
    assert "a rank of stage " in both["offload"]
    assert re.search("; all 4 ranks read .* and write .*; files are in a b$", both["disks"])
    assert written_sentence(5 * 2**20, 10.0) == "5.00 MiB written to disks, which is 42.2 GiB a day"
    assert written_sentence(0, 0.0) == "0 B written to disks"


def test_the_table_tells_of_every_tier() -> None:
    def lines(words: str) -> list[str]:
        run = parse_run([*MODEL, *words.split()], 1)
        return stage_table(stage_bytes(run, axes_of(run, 1))).splitlines()

    assert len(lines("")) == 3 and lines("")[0].endswith("total")
    for words, zeros in {"cpu": (False, True), "nvme --nvme-path a": (True, False), "cpu:0.5": (False, True)}.items():
        told = lines(f"--offload-optimizer {words}")
        assert told[0].endswith("device") and max(map(len, told)) <= 98
        heads = re.split("  +", told[4])
        assert heads == ["stage", "host: weights", "gradients", "optimizer", "on its way", "host memory", "disks"]
        cells = re.split("  +", told[6])
        assert (cells[3] == "0 B", cells[6] == "0 B") == zeros and cells[5] != "0 B"
        assert (cells[4] == "0 B") is not words.startswith("nvme"), "on a CPU updates of state in memory need no slots"
        assert cells[1] == cells[2] == "0 B"


def test_files_are_those_of_the_arithmetic(tmp_path: Path) -> None:
    """What the table says of disks is what is made there, in one folder."""
    run = parse_run([*MODEL, *PARTS, *on_disk(tmp_path)], 1)
    (stage,) = stage_bytes(run, axes_of(run, 1))
    pieces = RankState(run, axes_of(run, 1), Coordinates(0, 0, 0, 0), nccl=False).pieces[Tier.DISK]
    space = open_swap([tmp_path], pieces, job="arithmetic", slots=1)
    assert stage.elsewhere.files == space.file_bytes == sum(path.stat().st_size for path in space.paths)
    assert stage.elsewhere.on(Tier.DISK) == sum(pieces.values())
    space.close(remove=True)
