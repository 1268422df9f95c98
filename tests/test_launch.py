"""How a rank's process ends before its first step: with all others, or alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from megazero import launch
from megazero.launch import Environment, exit_early


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """A launcher's store, and its rank 1 of 2 that leaves no process."""

    def leave(status: int) -> NoReturn:
        raise Left(status)

    held = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(launch, "_store", lambda environment: held)
    monkeypatch.setattr(launch, "exit_now", leave)
    monkeypatch.setattr(launch, "WAIT_FOR_OTHERS", 0.0)
    return held


def stopped(rank: int) -> int:
    with pytest.raises(Left) as left:
        exit_early("SIGTERM", Environment(rank=rank, local_rank=rank, world_size=2, local_world_size=2))
    return int(left.value.args[0])


def test_a_rank_that_alone_is_told_to_stop_fails(
    store: dist.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others would wait for it: status 1 has the launcher end them, and its summary says why."""
    assert stopped(1) == 1
    said = "rank 1 stopped: SIGTERM came before the first step, and to 1 of 2 ranks only"
    captured = capsys.readouterr()
    assert captured.err == f"{said}\n" and captured.out == ""
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == said


def test_ranks_that_are_all_told_to_stop_end_well(
    store: dist.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add("megazero/told to stop", 1)
    assert stopped(0) == 0
    captured = capsys.readouterr()
    assert captured.out == "stopped by SIGTERM before the first step: there is nothing to save\n" and captured.err == ""
    assert not (tmp_path / "error.json").exists()


@pytest.mark.parametrize(("rank", "left"), [(0, "--hidden-size 0"), (1, "the configuration is wrong; rank 0 says how")])
def test_a_wrong_configuration_is_one_whoever_leaves_first(
    rank: int, left: str, store: dist.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher ends the ranks that are slower to leave: nothing is put over what they have said, and their status
    is that of the others.
    """
    store.set("megazero/configuration", "2")
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": "--hidden-size 0"}}))
    assert stopped(rank) == 2
    assert capsys.readouterr() == ("", "")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == left
