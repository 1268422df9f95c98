"""What goes wrong with swap files that are a checkpoint: each fault is one clear error, or a run that goes on whole."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.config.tiers import Tier
from megazero.disk import swap
from megazero.disk.opening import open_swap, record_of
from megazero.disk.swap import SwapRecord
from megazero.disk.swap_file import CHECKPOINT, DiskError
from megazero.mpu.axes import Coordinates, axes_of
from megazero.plan.rank_state import RankState
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Instruction, Piece
from megazero.report.banner import schedule_lines
from megazero.report.run_report import gather
from megazero.train.checked import dry_run_text
from megazero.train.requirements import swap_bytes
from megazero.zero.mover import Mover
from tests.disks import fill, remount, small_disk
from tests.parity.training import job_on_rank
from tests.ranks import run_ranks
from tests.train.test_whole_steps import STEPS, Bits, flags_of, problem_on_rank, run, whole

pytestmark = pytest.mark.slow
WORDS = "--precision bf16"
RECORD, FILE = "megazero-swap-checkpoint-00000.json", "megazero-swap-checkpoint-00000.bin"
SHARE = ["--offload-optimizer", "nvme:0.5"]
WAY_OUT = "to begin without these files: delete {folder}/megazero-swap-checkpoint-*"


@pytest.fixture
def disks(tmp_path: Path) -> Path:
    folder = tmp_path / "disks"
    folder.mkdir()
    return folder


@pytest.fixture
def flags(corpus: Path, tmp_path: Path, disks: Path) -> list[str]:
    return [*flags_of(corpus, tmp_path, WORDS), *whole(disks)]


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """A run that has no swap files."""
    (bits,) = run(1, flags_of(corpus, tmp_path_factory.mktemp("straight"), WORDS), set())
    return bits


def goes_on(flags: list[str], straight: Bits, step: int) -> None:
    """A run goes on from this step, and ends as the straight one."""
    (resumed,) = run(1, flags, set())
    assert resumed.begins == step
    assert resumed.told == [told for told in straight.told if told.iteration > step]
    assert resumed.weights == straight.weights


def begin_fails(flags: list[str], kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as raised:
        job_on_rank(0, 1, flags)
    return str(raised.value)


# --- faults in the middle of a run ---------------------------------------------------------------------------------


def fails(flags: list[str], step: int, fault: Callable[[], object]) -> str:
    """What a run says whose fault comes with the first part that it writes in this step."""
    job, _ = job_on_rank(0, 1, flags)
    write = Mover.write

    def written(mover: Mover, i: Instruction, piece: Piece) -> None:
        if job.trainer.position.iteration == step - 1 and i.key == (len(job.state.model.buckets) - 1, 0):
            fault()
        write(mover, i, piece)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DiskError) as raised:
        patch.setattr(Mover, "write", written)
        job.fit()
    job.close()
    return str(raised.value)


def test_a_disk_that_is_full_in_the_middle_of_a_step(corpus: Path, tmp_path: Path, straight: Bits) -> None:
    """The files have their space from the start. The record has not: its step stays the one before."""
    with small_disk(tmp_path / "small", 4 << 20) as disk:
        flags = [*flags_of(corpus, tmp_path, WORDS), *whole(disk)]
        ballast: list[Path] = []
        said = fails(flags, 3, lambda: ballast.append(fill(disk)))
        assert re.search(rf"{disk}/{RECORD}: the record of step [23] cannot be written: the disk is full", said)
        ballast[0].unlink()
        record = record_of([disk], CHECKPOINT, 0)
        assert record is not None and f"step {record.last.step + 1} " in said
        goes_on(flags, straight, record.last.step)
        assert list(disk.iterdir()) == []


def test_a_write_that_fails_in_the_middle_of_a_step(flags: list[str], disks: Path, straight: Bits) -> None:
    moves = swap.run_moves

    def limited(transport: Any, write: bool, plan: Any, memory: Any, names: Any, files: Any) -> list[int]:
        if write:
            raise DiskError(f"{files[0].path}: writing piece {names[0]!r}: the disk reports an error")
        return moves(transport, write, plan, memory, names, files)

    with pytest.MonkeyPatch.context() as patch:
        said = fails(flags, 4, lambda: patch.setattr(swap, "run_moves", limited))
    assert re.search(rf"{disks}/{FILE}: writing piece 'bucket \d+, part \d+': the disk reports an error", said)
    goes_on(flags, straight, 3)
    assert list(disks.iterdir()) == []


def test_a_folder_that_vanishes_in_the_middle_of_a_run(
    flags: list[str], disks: Path, tmp_path: Path, straight: Bits
) -> None:
    """The last checkpoint is good: what was read and written so far is in the files, which are open."""
    saves = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--save-interval", "2"]
    said = fails([*flags, *saves], 4, lambda: shutil.rmtree(disks))
    assert re.search(rf"{disks}/{FILE}: has been removed while step [34] was written", said), said
    assert f"--nvme-path {disks}: there is no such folder" in begin_fails([*flags, *saves])
    disks.mkdir()
    goes_on([*flags, *saves], straight, 4)
    assert list(disks.iterdir()) == []


# --- what an earlier process has left ------------------------------------------------------------------------------


def left(flags: list[str], dies: int = 4) -> None:
    """Swap files of a run that has ended in the middle of this step."""
    run(1, flags, set(), dies)


def test_a_file_that_was_cut(flags: list[str], disks: Path) -> None:
    left(flags)
    size = (disks / FILE).stat().st_size
    with (disks / FILE).open("r+b") as file:
        file.truncate(size - 5000)
    said = begin_fails(flags)
    assert f"{disks}/{FILE}: has {size - 5000:,} bytes, not the {size:,} with which it was made" in said
    assert WAY_OUT.format(folder=disks) in said and len(list(disks.iterdir())) == 2


@pytest.mark.parametrize("read", [True, False])
def test_one_flipped_bit(read: bool, flags: list[str], disks: Path, straight: Bits) -> None:
    """In the slot that the step is read from, or in the other one, from which nobody reads."""
    left(flags)
    parsed = parse_run(flags, 1)
    pieces = RankState(parsed, axes_of(parsed, 1), Coordinates(0, 0, 0, 0), nccl=False).pieces[Tier.DISK]
    space = open_swap([disks], pieces, job=CHECKPOINT, resume=True)
    assert space.record is not None and parsed.offload.nvme_checkpoint
    name = list(pieces)[-1]
    slot = space.record.last.versions[name].slot
    (extent,) = space._layout.extents(name, slot if read else 1 - slot)
    space.close(remove=False)
    with (disks / FILE).open("r+b") as file:
        file.seek(extent.offset + 1234)
        byte = file.read(1)[0]
        file.seek(extent.offset + 1234)
        file.write(bytes([byte ^ 8]))
    if not read:
        goes_on(flags, straight, 3)
        return
    said = begin_fails(flags, DiskError)
    assert f"{FILE} at byte {extent.offset:,}: piece {name!r} of {pieces[name]:,} bytes has the checksum" in said
    assert WAY_OUT.format(folder=disks) in said and len(list(disks.iterdir())) == 2


def test_a_damaged_record(flags: list[str], disks: Path) -> None:
    left(flags)
    text = (disks / RECORD).read_text()
    (disks / RECORD).write_text(text.replace('"step": 3', '"step": 2', 1))
    said = other_settings(flags)
    assert f"{disks}/{RECORD}: its checksum is not that of its" in said and WAY_OUT.format(folder=disks) in said


def test_a_read_only_disk(corpus: Path, tmp_path: Path, straight: Bits) -> None:
    with small_disk(tmp_path / "small", 4 << 20) as disk:
        flags = [*flags_of(corpus, tmp_path, WORDS), *whole(disk)]
        left(flags)
        remount(disk, "ro")
        assert f"--nvme-path {disk}: may not be written in" in begin_fails(flags)
        remount(disk, "rw")
        goes_on(flags, straight, 3)


def check_says(flags: list[str]) -> str:
    """The answer of --validate-only."""
    try:
        return dry_run_text(parse_arguments([*flags, "--validate-only"], 1), 1)
    except ConfigError as error:
        return str(error)


def other_settings(flags: list[str], *words: str) -> str:
    """What a start says, and --validate-only beforehand."""
    problem = check_says([*flags, *words])
    assert begin_fails([*flags, *words]) == problem
    return problem


def test_another_run(flags: list[str], disks: Path, corpus: Path, tmp_path: Path, straight: Bits) -> None:
    """It is said what differs, nothing is lost, and the run itself still goes on."""
    left(flags)
    head = f"--nvme-path {disks}: {disks}/{RECORD}: has iteration 3 of a run with "
    for words, said in {
        "--num-layers 4": "another model (--num-layers: 3 in the checkpoint, 4 now; the model's shape cannot change",
        "--lr 2e-3": "other settings (lr 0.001 -> 0.002",
        "--global-batch-size 4": "other settings (global-batch-size 8 -> 4",
        "--precision fp32": "another layout (precision bf16 -> fp32",
        "--nvme-buffer-bytes 600KB": "another layout (nvme-buffer-bytes 450000 -> 600000",
    }.items():
        found = other_settings(flags, *words.split())
        assert head + said in found, found
        assert "the command of that run with --save DIR, then this one with --load DIR" in found
    unsaid = other_settings(flags, "--bucket-size", "5000")  # given now only, so the settings show no difference
    assert head + "another layout (its parts have other sizes: --bucket-size, for one" in unsaid, unsaid
    (tmp_path / "more").mkdir()
    found = other_settings([*flags_of(corpus, tmp_path, WORDS), *whole(tmp_path / "more", disks)])
    assert f"other folders (nvme-path {disks} -> {tmp_path}/more {disks})" in found
    assert "OK: " in check_says(flags)
    goes_on(flags, straight, 3)


def test_files_stay_while_other_runs_use_the_folder(flags: list[str], disks: Path, straight: Bits) -> None:
    left(flags)
    run(1, [word for word in flags if word != "--nvme-checkpoint"], set())
    assert sorted(path.name for path in disks.iterdir()) == [FILE, RECORD]
    goes_on(flags, straight, 3)


def test_a_later_checkpoint_counts_more(flags: list[str], disks: Path, tmp_path: Path, straight: Bits) -> None:
    """Files of the same run, with another layout even, begin anew."""
    saves = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--save-interval", "3"]
    left([*flags, *saves], dies=4)
    record = record_of([disks], CHECKPOINT, 0)
    assert record is not None and record.last.step == 3
    assert "OK: " in check_says([*flags, *saves, "--nvme-buffer-bytes", "600KB"])
    goes_on([*flags, *saves, "--nvme-buffer-bytes", "600KB"], straight, 3)
    assert list(disks.iterdir()) == []


def test_a_share_of_nothing_is_a_whole_step_too(corpus: Path, tmp_path: Path, disks: Path, straight: Bits) -> None:
    """All that is written rests on the device."""
    flags = [*flags_of(corpus, tmp_path, WORDS), *whole(disks, offload="nvme:0.0001")]
    run(1, [*flags, "--exit-interval", "2"], set())
    goes_on(flags, straight, 2)


def test_a_run_that_stops_without_a_checkpoint_keeps_its_files(flags: list[str], disks: Path, tmp_path: Path) -> None:
    stops = ["--exit-interval", "2"]
    run(1, [*flags, *stops], set())
    assert sorted(path.name for path in disks.iterdir()) == [FILE, RECORD]
    (second,) = run(1, [*flags, *stops, "--save", str(tmp_path / "saved")], set())
    assert second.begins == 2 and list(disks.iterdir()) == []


def test_files_are_twice_as_large(flags: list[str], tmp_path: Path) -> None:
    """And with a share as large, since what stays on the device is there too."""
    sizes = []
    for words in ([word for word in flags if word != "--nvme-checkpoint"], flags, [*flags, *SHARE]):
        parsed = parse_run(words, 1)
        sizes.append(swap_bytes(parsed, axes_of(parsed, 1), range(1)))
        (space,) = run_ranks(1, file_bytes_on_rank, 1, words)
        assert space == sizes[-1]
    assert 1.98 < sizes[1] / sizes[0] <= 2 and 0.98 < sizes[2] / sizes[1] < 1.02
    steps = StageLists(parse_run([*flags, *SHARE], 1), axes_of(parsed, 1), nccl=False)
    told = dict(schedule_lines(gather(steps)))["disks"]
    assert re.search(r"a step reads [\d.]+ KiB and writes [\d.]+ KiB; files are in .*; each step is", told)


def file_bytes_on_rank(rank: int, size: int, flags: list[str]) -> int:
    """Of the files that a job makes."""
    job, _ = job_on_rank(rank, size, flags)
    files = job.state.model.tiers.swap
    job.close()
    assert files is not None
    return files.file_bytes


# --- several ranks -------------------------------------------------------------------------------------------------


def on_both_sides(rank: int, size: int, flags: list[str]) -> int:
    """The last whole step of a rank. Both end behind step 3: rank 0 has flipped to it, rank 1 has not."""
    job, _ = job_on_rank(rank, size, flags)
    write = SwapRecord.write

    def written(record: SwapRecord, path: Path) -> None:
        if rank == 1 and record.last.step == 3:
            raise DiskError("killed before the flip")
        write(record, path)

    class Ends(Exception):
        pass

    wait = job.trainer.whole_steps.wait

    def waited() -> None:
        wait()
        if job.trainer.position.iteration == 3:
            raise Ends

    with pytest.MonkeyPatch.context() as patch, pytest.raises((DiskError, Ends)):
        patch.setattr(SwapRecord, "write", written)
        patch.setattr(job.trainer.whole_steps, "wait", waited)
        job.fit()
    job.close()
    swap_files = job.state.model.tiers.swap
    assert swap_files is not None and swap_files.record is not None
    return swap_files.record.last.step


def test_ranks_on_both_sides_of_a_flip_go_on_from_the_earlier_step(corpus: Path, tmp_path: Path, disks: Path) -> None:
    flags = [*flags_of(corpus, tmp_path, "--precision bf16 --zero-stage 1"), *whole(disks)]
    straight = run(2, flags, set())
    assert run_ranks(2, on_both_sides, 2, flags) == [3, 2]
    again = run(2, flags, set())
    for own, then in zip(straight, again, strict=True):
        assert then.begins == 2 and then.weights == own.weights
        assert then.told == [told for told in own.told if told.iteration > 2]
    assert list(disks.iterdir()) == []


def test_a_rank_whose_files_are_gone(corpus: Path, tmp_path: Path, disks: Path) -> None:
    """All ranks say which one, and what the others have stays."""
    flags = [*flags_of(corpus, tmp_path, "--precision bf16 --zero-stage 1"), *whole(disks)]
    run(2, flags, set(), 4)
    for path in disks.glob("*checkpoint-00001*"):
        path.unlink()
    for said in run_ranks(2, problem_on_rank, 2, flags):
        assert f"{disks}/megazero-swap-checkpoint-00001.json: is missing, and other ranks have step 3" in said
    assert sorted(path.name for path in disks.iterdir()) == [FILE, RECORD]


def test_another_number_of_ranks(corpus: Path, tmp_path: Path, disks: Path) -> None:
    flags = [*flags_of(corpus, tmp_path, "--precision bf16 --zero-stage 1"), *whole(disks)]
    run(2, flags, set(), 4)
    for size in (1, 4):
        for said in run_ranks(size, problem_on_rank, size, flags):
            assert "has iteration 3 of a run with another layout (dp 2 -> " in said
    assert len(list(disks.iterdir())) == 4


def test_killed_before_the_first_flip_of_all_ranks(corpus: Path, tmp_path: Path, disks: Path) -> None:
    """One rank has flipped once: nothing is lost with it, and the run begins anew."""
    flags = [*flags_of(corpus, tmp_path, "--precision bf16 --zero-stage 1"), *whole(disks)]
    run(2, flags, set(), 2)
    (disks / "megazero-swap-checkpoint-00001.json").unlink()
    record = record_of([disks], CHECKPOINT, 0)
    assert record is not None and record.steps == [1]
    assert [found.begins for found in run(2, flags, set())] == [0, 0]


def early_on_rank(rank: int, size: int, flags: list[str], late: int) -> int:
    """How many parts a run has written. While it writes one, all ranks have flipped to the step before."""
    job, _ = job_on_rank(rank, size, flags)
    write, flip, seen = Mover.write, SwapRecord.write, [0]

    def slow(record: SwapRecord, path: Path) -> None:
        flip(record, path)
        for _ in range(200 * rank):
            json.dumps(record.last.about)

    def written(mover: Mover, i: Instruction, piece: Piece) -> None:
        under_way = job.trainer.position.iteration + 1 - late
        for other in range(size):
            record = record_of([Path(job.run.offload.nvme_path[0])], CHECKPOINT, other)
            assert under_way <= 1 or (record is not None and record.last.step >= under_way - 1), (under_way, other)
        seen[0] += 1
        write(mover, i, piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwapRecord, "write", slow)
        patch.setattr(Mover, "write", written)
        job.trainer.batches.valid.clear()  # type: ignore[attr-defined]
        job.fit()
    job.close()
    return seen[0]


@pytest.mark.parametrize("late", [0, 1])
def test_no_rank_writes_before_all_have_flipped(late: int, corpus: Path, tmp_path: Path, disks: Path) -> None:
    words = "--precision bf16 --zero-stage 1 --eval-interval 100" + " --late-update" * late
    flags = [*flags_of(corpus, tmp_path, words), *whole(disks)]
    assert min(run_ranks(2, early_on_rank, 2, flags, late)) > STEPS
