"""How a rank's process ends before its first step: with all others, or alone."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from fused_ops.native import library
from megazero import launch
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.launch import exit_early, exit_status
from megazero.mpu import meeting
from megazero.mpu.meeting import Environment
from megazero.system import allocator
from megazero.system import device as devices


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
    monkeypatch.setattr(meeting, "store_of", lambda environment: held)
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


@pytest.mark.parametrize(
    ("rank", "report", "status", "recorded"),
    [
        (0, [0, 2, "the configuration is wrong; rank 0 says how", "--lr 0"], 2, "its own"),
        (1, [0, 2, "the configuration is wrong; rank 0 says how", "--lr 0"], 2, None),
        (0, [1, 2, "the configuration is wrong; rank 1 says how", "--lr 0"], 2, None),
        (0, [1, 1, "rank 1 failed first", "OSError"], 1, None),
    ],
)
def test_the_end_has_one_reason_whoever_leaves_first(
    rank: int,
    report: list[Any],
    status: int,
    recorded: str | None,
    store: dist.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher ends the ranks that are slower to leave: nothing is put over what they have said, their status is
    that of the first, and they do not wait for a signal to all ranks.
    """
    monkeypatch.setattr(launch, "WAIT_FOR_OTHERS", 600.0)
    store.set(meeting.FIRST_REPORT, json.dumps(report))
    if recorded is not None:
        (tmp_path / "error.json").write_text(json.dumps({"message": {"message": recorded}}))
    assert stopped(rank) == status
    assert capsys.readouterr() == ("", "")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == (recorded or report[2])


def ends(wrong: dict[int, str], seconds: dict[int, float], size: int = 4) -> dict[int, float]:
    """Ranks, as threads, whose checks take so many seconds (0) and end with a ConfigError, or with nothing wrong. When
    each of those with an error was at its end.
    """
    begin, ended = time.monotonic(), dict[int, float]()

    def check(rank: int) -> None:
        environment = Environment(rank, rank, size, size)

        def work() -> None:
            time.sleep(seconds.get(rank, 0.0))
            if rank in wrong:
                raise ConfigError([wrong[rank]])
            meeting.report_nothing_wrong(environment)

        status = exit_status(work, environment)
        if rank in wrong:
            assert status == 2
            ended[rank] = time.monotonic() - begin

    ranks = [threading.Thread(target=check, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert ended.keys() == wrong.keys()
    return ended


A, B = "--lr 0", "--data-path: no file"


def test_rank_0_alone_says_what_all_ranks_find(store: dist.Store, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the last to find it."""
    ends(dict.fromkeys(range(4), A), {0: 0.3})
    captured = capsys.readouterr().err
    assert captured.count(A) == 1 and "rank" not in captured


def test_ranks_that_fail_differently_all_say_so(store: dist.Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Where rank 0 has nothing to say. The first waits until the last has ended its checks; two with the same problem
    say it once.
    """
    ended = ends({1: A, 2: B, 3: B}, {2: 0.5, 3: 0.5})
    captured = capsys.readouterr().err
    assert captured.count(A) == captured.count(B) == 1
    assert 0.5 <= ended[1] < 3 and max(ended.values()) < 3, ended


@pytest.mark.parametrize("wrong", [{1: A}, {0: A, 1: A}, {0: B, 1: A}])
def test_a_rank_does_not_wait_long_for_rank_0(
    wrong: dict[int, str], store: dist.Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 may read long data. What it finds after all is said too, unless it is the same."""
    monkeypatch.setattr(launch, "WAIT_FOR_RANK_0", 0.2)
    monkeypatch.setattr(launch, "WAIT_FOR_CHECKS", 0.2)
    ended = ends(wrong, {0: 1.5})
    captured = capsys.readouterr().err
    assert captured.count(f"rank 1: 1 problem in the configuration:\n  1. {A}") == 1 and ended[1] < 1.2
    assert [captured.count(problem) for problem in (A, B)] == [1, wrong.get(0) == B]


def test_ranks_that_have_met_report_once_more(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That rank 0 had found nothing wrong before says nothing about the checks that they make together."""
    ends({}, {})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    ends(dict.fromkeys(range(4), A), {0: 0.3})
    captured = capsys.readouterr().err
    assert captured.count(A) == 1 and "rank" not in captured


def test_ranks_that_torchrun_has_restarted_report_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun's store has what the ranks before them said."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(served.port))
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        ends({0: A, 1: A}, {}, size=2)
        assert capsys.readouterr().err.count(A) == 1


@pytest.mark.parametrize(
    ("device", "settings", "taken"),
    [
        ("cpu", allocator.settings(), ["take_host_tensors"]),
        ("cpu", "glibc.malloc.trim_threshold=1", []),
        ("meta", allocator.settings(), []),
    ],
)
def test_tensors_of_a_cpu_are_in_the_heap_as_a_run_has_set_it(
    device: str, settings: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own settings are those of another way to allocate."""
    calls = list[str]()
    monkeypatch.setattr(library, "torch_library", lambda asked: SimpleNamespace(call=calls.append))
    monkeypatch.setattr(launch, "die_with_parent", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(devices, "resolve", lambda *_: torch.device(device))
    monkeypatch.setenv(allocator.VARIABLE, settings)
    with launch.launch(Run(), Environment(0, 0, 1, 1)):
        assert calls == taken
