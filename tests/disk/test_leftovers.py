"""Files that others have left, and files that others use."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest

from megazero.disk.opening import open_swap
from megazero.disk.swap_file import CHECKPOINT, DiskError, leftover_bytes, remove_leftovers
from megazero.disk.transports import DiskOptions
from tests.disk.contents import contents
from tests.forks import fork

PIECES = {"a": 9000}
OPTIONS = DiskOptions(1 << 16, 1, "threads")


def in_a_child(folder: Path, job: str, rank: int) -> int:
    """The process id of a child that has written a step and holds its files."""
    ready, tell = os.pipe()
    child = fork()
    if not child:
        space = open_swap([folder], PIECES, OPTIONS, job=job, rank=rank)
        space.write(contents(PIECES))
        space.flip(1).wait()
        (folder / f".megazero-swap-{job}-{rank:05d}.json-{os.getpid()}").touch()  # killed while it wrote the record
        os.write(tell, b"1")
        time.sleep(60)
        os._exit(0)
    os.close(tell)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_run_removes_what_dead_processes_have_left_and_nothing_else(tmp_path: Path) -> None:
    others = ["megazero-swap-notes.txt", "mine.bin", "swap-a-00000.bin"]
    for name in others:
        (tmp_path / name).touch()
    dead, alive = in_a_child(tmp_path, "dead", 3), in_a_child(tmp_path, "alive", 0)
    try:
        with pytest.raises(DiskError, match=rf"alive-00000.bin: process {alive} uses it"):
            open_swap([tmp_path], PIECES, OPTIONS, job="alive")
        assert remove_leftovers(tmp_path) == [] and len(names(tmp_path)) == 3 + 6
        kill(dead)
        assert remove_leftovers(tmp_path, keep="dead") == []
        space = open_swap([tmp_path], PIECES, OPTIONS, job="other")
        kept = [
            f".megazero-swap-alive-00000.json-{alive}",
            "megazero-swap-alive-00000.bin",
            "megazero-swap-alive-00000.json",
        ]
        assert names(tmp_path) == sorted([*kept, *others, "megazero-swap-other-00000.bin"])
        space.close(remove=True)
    finally:
        kill(alive)
    assert remove_leftovers(tmp_path) == ["megazero-swap-alive-00000.bin"]
    assert names(tmp_path) == sorted(others)


def test_a_process_that_goes_on_removes_the_record_that_was_not_finished(tmp_path: Path) -> None:
    kill(in_a_child(tmp_path, "dead", 3))
    assert len(names(tmp_path)) == 3
    space = open_swap([tmp_path], PIECES, OPTIONS, job="dead", rank=3, resume=True)
    assert names(tmp_path) == ["megazero-swap-dead-00003.bin", "megazero-swap-dead-00003.json"]
    space.close(remove=True)


@pytest.mark.parametrize("look", [lambda folder: remove_leftovers(folder, jobs="job"), leftover_bytes])
def test_a_file_that_another_process_only_looks_at_is_not_in_use(
    look: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "megazero-swap-job-00006.bin").touch()
    locked, opened = Event(), Event()
    lock = fcntl.flock

    def slowly(handle: int, how: int) -> None:
        lock(handle, how)
        if current_thread() is looker and stat.S_ISREG(os.fstat(handle).st_mode):
            locked.set()
            opened.wait(0.2)  # it cannot happen while the lock is held

    monkeypatch.setattr(fcntl, "flock", slowly)
    looker = Thread(target=look, args=(tmp_path,))
    looker.start()
    try:
        assert locked.wait(60)
        space = open_swap([tmp_path], PIECES, OPTIONS, job="job", rank=6)
        opened.set()
        space.close(remove=True)
    finally:
        looker.join()


def test_files_of_a_checkpoint_stay_until_their_own_job_begins_anew(tmp_path: Path) -> None:
    kill(in_a_child(tmp_path, CHECKPOINT, 1))
    there = names(tmp_path)
    held = leftover_bytes(tmp_path, checkpoints=True)
    assert remove_leftovers(tmp_path) == [] and leftover_bytes(tmp_path) == 0 < held
    open_swap([tmp_path], PIECES, OPTIONS, job="other").close(remove=True)
    assert names(tmp_path) == there
    open_swap([tmp_path], PIECES, OPTIONS, job=CHECKPOINT).close(remove=True)
    assert names(tmp_path) == []


def test_a_record_without_its_file_is_left_over_too(tmp_path: Path) -> None:
    (tmp_path / "megazero-swap-x-y-00012.json").write_text("{}")
    assert remove_leftovers(tmp_path) == ["megazero-swap-x-y-00012.bin"]
    assert names(tmp_path) == []
    assert remove_leftovers(tmp_path / "none") == []


def test_another_users_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("x")
    (tmp_path / "megazero-swap-test-00000.bin").symlink_to(target)
    with pytest.raises(DiskError, match="cannot be opened"):
        open_swap([tmp_path], PIECES, OPTIONS, job="test")
    assert target.read_text() == "x"
