"""kill -9 of a run whose swap files are its checkpoint: it goes on from a step that all ranks have whole."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megazero.disk.opening import record_of
from megazero.disk.swap_file import CHECKPOINT
from tests.e2e.command import TINY, Running, metrics
from tests.e2e.halting import Halt, Launch, whole
from tests.e2e.test_kill import Kill, check_bitwise, kill

STEPS = 26
KILLS = 5
LAYOUTS = {
    "one rank": (1, "--precision bf16"),
    "one rank, late": (1, "--precision fp16 --late-update"),
    "one rank, early": (1, "--precision fp16 --early-update --clip-grad 0"),
    "ZeRO-1, early": (2, "--precision bf16 --zero-stage 1 --early-update --clip-grad 1.3"),
    "ZeRO-3 over stages, early": (4, "--precision bf16 --pp 2 --zero-stage 3 --early-update --clip-grad 0"),
    "ZeRO-0": (2, "--precision fp32"),
    "ZeRO-1": (2, "--precision bf16 --zero-stage 1"),
    "two folders": (2, "--precision bf16 --nvme-path {disks}/a {disks}/b --nvme-buffer-bytes 4MB"),
    "stages, late": (2, "--precision bf16 --pp 2 --late-update"),
    "ZeRO-3": (2, "--precision bf16 --zero-stage 3"),
    "ZeRO-3, late": (2, "--precision bf16 --zero-stage 3 --late-update"),
    "ZeRO-1 over stages": (4, "--precision fp16 --pp 2 --zero-stage 1"),
    "ZeRO-2 over stages, late": (
        4,
        "--precision bf16 --pp 2 --zero-stage 2 --late-update --offload-optimizer nvme:0.6",
    ),
}


def flags_of(folder: Path, corpus: Path, words: str) -> list[object]:
    disks = folder / "disks"
    for place in (disks, disks / "a", disks / "b"):
        place.mkdir(parents=True)
    data = ["--data-path", corpus, "--data-cache-path", folder.parent / "cache", "--hidden-dropout", 0.1]
    numbers = ["--global-batch-size", 8, "--train-iters", STEPS, "--lr-warmup-iters", 5, "--eval-iters", 0]
    swap = ["--offload-optimizer", "nvme", "--nvme-path", disks / "a", "--nvme-buffer-bytes", "300KB"]
    more = words.format(disks=disks).split()
    return [*TINY, *data, *numbers, *swap, "--nvme-checkpoint", *more, "--metrics-file", folder / "m"]


def began(told: str) -> int:
    """The iteration from which the run of this output says that it begins."""
    found = re.search(r"\bstart (from scratch|swap files in \S+( \S+)?, iteration (\d+))", " ".join(told.split()))
    assert found is not None, told
    return int(found[3] or 0)


def in_the_middle(kill: Kill, folder: Path, _: Running) -> None:
    """No step behind the one of the kill has begun."""
    steps = metrics(folder / "m")
    assert not steps or steps[-1]["iteration"] <= kill.iteration <= STEPS


def counts(ranks: int, flags: Sequence[object], folder: Path) -> dict[str, list[int]]:
    """How many collectives and changes on disks a step has, by rank. The run is the undisturbed one."""
    files = {point: [folder / f"{point}-{rank}" for rank in range(ranks)] for point in ("launch", "disk")}
    halts = [Launch(point, 3, rank, str(path)) for point, paths in files.items() for rank, path in enumerate(paths)]
    whole(ranks, flags, folder, halts)
    return {point: [int(path.read_text()) for path in paths] for point, paths in files.items()}


def last_whole(ranks: int, folder: Path) -> int:
    """The step that the records on disks have in common; 0 if a rank has none."""
    records = [record_of([folder / "disks" / "a"], CHECKPOINT, rank) for rank in range(ranks)]
    return min(0 if record is None else record.last.step for record in records)


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_killed_at_random_moments_a_run_goes_on_from_its_swap_files(
    name: str, seed: int, tmp_path: Path, corpus: Path
) -> None:
    """Before any collective or any change on disks, on any rank; every kill hits what the one before has left."""
    ranks, words = LAYOUTS[name]
    folder, reference = tmp_path / "killed", tmp_path / "reference"
    of_step = counts(ranks, flags_of(reference, corpus, words), reference)
    flags, draw, begins = flags_of(folder, corpus, words), random.Random(f"{seed} {name}"), 0
    for before in range(KILLS):
        point = draw.choice([point for point, numbers in of_step.items() if min(numbers)])
        rank, iteration = draw.randrange(ranks), begins + (draw.randint(3, 5) if before else 2)
        number, whom = draw.randint(1, of_step[point][rank]), draw.choice(("rank", "launcher"))
        told = kill(Kill(begins, point, iteration, rank, 0, whom, number=number), ranks, flags, folder, in_the_middle)
        assert began(told) == begins, (point, iteration, rank, number)
        begins = last_whole(ranks, folder)
        assert iteration - 2 <= begins <= iteration
    assert began(whole(ranks, flags, folder)) == begins > 0
    check_bitwise(folder, reference, STEPS)
    assert not list((folder / "disks").rglob("*megazero*"))


@pytest.fixture(scope="module")
def unlimited(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with io_uring where it is allowed."""
    folder = tmp_path_factory.mktemp("unlimited") / "reference"
    whole(1, flags_of(folder, corpus, "--precision bf16"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["no io_uring", "short reads"])
def test_limits_of_the_system_change_no_bit(limit: str, unlimited: Path, tmp_path: Path, corpus: Path) -> None:
    """Before the kill and behind it."""
    folder = tmp_path / "limited"
    flags = flags_of(folder, corpus, "--precision bf16")
    kill(Kill(0, "disk", 5, 0, 0, number=9), 1, flags, folder, in_the_middle)
    begins, told = last_whole(1, folder), whole(1, flags, folder, [Halt(limit, 0, 0, "")])
    assert began(told) == begins >= 3 and "threads with" in told and "no io_uring" in told
    check_bitwise(folder, unlimited, STEPS)
    assert not list((folder / "disks").rglob("*megazero*"))
