"""Saves as the loop sees them, on a disk that is really full: told, tried again, and what was there
before stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megazero.checkpoint.format import COLUMNS
from megazero.mpu.shared_memory import PeerError
from megazero.train.save_policy import PAUSES, SavePolicy
from megazero.train.state import TrainingPosition
from tests.checkpoint.runs import names, open_run, resumed_at, values_at
from tests.disks import fill, small_disk

ROOM = 100_000 * len(COLUMNS)
"""Bytes of the disk: three checkpoints and a half of the fake state."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", ROOM) as folder:
        yield folder


def in_state(state: object, iteration: int) -> TrainingPosition:
    state.set(values_at(iteration))  # type: ignore[attr-defined]
    return TrainingPosition(iteration)


@pytest.mark.parametrize("in_background", [False, True], ids=["plain", "async"])
def test_a_full_disk_is_told_and_tried_again(in_background: bool, disk: Path) -> None:
    told: list[str] = []
    checkpoints, state = open_run(disk / "saved", "t")
    checkpoints.claim()
    saves = SavePolicy(
        checkpoints, lambda at: {"iteration": at.iteration}, told.append, in_background=in_background, pauses=(0.0,) * 3
    )

    def save(iteration: int) -> None:
        saves.save(in_state(state, iteration))
        if in_background:
            checkpoints._background._thread.join()  # type: ignore[union-attr]
        saves.poll()

    save(1)
    ballast = fill(disk)
    save(2)
    assert told[1].startswith(
        "WARNING: the checkpoint of iteration 2 could not be written: [Errno 28] No space left on device: '"
    )
    assert "fragments-00001-of-00001.safetensors" in told[1] and "training goes on" in told[1]
    assert names(disk / "saved") == ["iter_0000001", "latest", "run_token"] and resumed_at(disk / "saved") == 1

    ballast.unlink()
    save(3)
    assert resumed_at(disk / "saved") == 3

    ballast = fill(disk)
    with pytest.raises(OSError, match="No space left on device"):
        saves.finish(in_state(state, 4))
    assert [line.rsplit("; ", 1)[1] for line in told[3:]] == [f"this was try {number} of 3" for number in (1, 2, 3)]
    assert (
        names(disk / "saved") == ["iter_0000001", "iter_0000003", "latest", "run_token"]
        and resumed_at(disk / "saved") == 3
    )

    saves._note = lambda text: ballast.unlink(missing_ok=True)  # room is made after the first try
    saves.finish(TrainingPosition(4))
    assert resumed_at(disk / "saved") == 4


def test_a_failure_that_another_try_cannot_mend_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, state = open_run(tmp_path, "t")
    checkpoints.claim()
    tries = []

    def without_a_rank(*args: object) -> None:
        tries.append(args)
        raise PeerError("rank 1 has ended")

    monkeypatch.setattr(checkpoints, "save", without_a_rank)
    saves = SavePolicy(checkpoints, lambda at: {}, lambda text: None, in_background=False)
    for save in (saves.save, saves.finish):
        with pytest.raises(PeerError):
            save(in_state(state, 1))
    assert len(tries) == 2


def test_the_tries_fit_into_the_time_that_clusters_give() -> None:
    assert len(PAUSES) > 2 and sum(PAUSES) < 30
