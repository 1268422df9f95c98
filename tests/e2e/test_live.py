"""Faults that meet a run while it works: a rank that is stopped, clocks that jump, disks and files that go away, a
terminal that is lost.

The test meets the run at pauses (`halting.Pause`), where a rank stands in a step: each fault is there while the run is.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from megazero.checkpoint.manager import find
from megazero.checkpoint.verify import verify
from tests.disks import fill, remount, small_disk
from tests.e2e.command import TINY, by_iteration, children, same
from tests.e2e.halting import Halt, Jump, Pause, forked

STEPS = 12
SECONDS = 240
HOURS = 5
UNWRITTEN = "WARNING: the checkpoint of iteration {} could not be written"


def flags_of(data: Path, cache: Path, saved: Path, metrics: Path) -> list[object]:
    read = ["--data-path", data, "--data-cache-path", cache]
    numbers = "--split 90,10,0 --eval-iters 0 --hidden-dropout 0.1 --precision bf16 --global-batch-size 8 "
    numbers += f"--micro-batch-size 2 --train-iters {STEPS} --zero-stage 1"
    places = ["--save", saved, "--load", saved, "--save-interval", 2, "--metrics-file", metrics]
    return [*TINY, *read, *numbers.split(), *places, "--exit-duration-in-mins", 60 * (HOURS - 1)]


class Live:
    """Two ranks that run, and what they have told."""

    def __init__(self, folder: Path, flags: Sequence[object], halts: Sequence[Halt]) -> None:
        self.pipe, self._screen, self._read = folder / "pipe", folder / "screen", b""
        for pipe in (self.pipe, Path(f"{self.pipe}.answer"), self._screen):
            os.mkfifo(pipe)
        self._reached, self._answer = os.open(self.pipe, os.O_RDWR), os.open(f"{self.pipe}.answer", os.O_RDWR)
        self._told = os.open(self._screen, os.O_RDONLY | os.O_NONBLOCK)
        self.process = forked(2, flags, self._screen, halts)
        assert self.process.pid is not None
        self._launcher = os.pidfd_open(self.process.pid)

    def arrives(self) -> int:
        """Process id of the rank that has come to the next pause."""
        ready = select.select([self._reached, self._launcher], [], [], SECONDS)[0]
        assert ready == [self._reached], f"it does not come to its next pause:\n{self.told()}"
        return int(os.read(self._reached, 64))

    def goes_on(self) -> None:
        os.write(self._answer, b".")

    def told(self) -> str:
        """All that the run has said."""
        while select.select([self._told], [], [], 0)[0] and (more := os.read(self._told, 65536)):
            self._read += more
        return self._read.decode()

    def hang_up(self) -> None:
        """Nobody reads any more what the run says."""
        os.close(self._told)

    def ends(self) -> int | None:
        """The launcher's status."""
        assert select.select([self._launcher], [], [], SECONDS)[0], f"it goes on for ever:\n{self.told()}"
        self.process.join()
        return self.process.exitcode


@contextmanager
def live(folder: Path, flags: Sequence[object], halts: Sequence[Halt]) -> Iterator[Live]:
    """A run that is over when the block is."""
    folder.mkdir(exist_ok=True)
    run = Live(folder, flags, halts)
    try:
        yield run
    finally:
        run.process.kill()  # its ranks go with it
        run.process.join()


def whole(saved: Path) -> int:
    """The iteration of the newest checkpoint, all of whose bytes are there."""
    found = find(saved)
    assert found is not None and verify(found.path, found.manifest, 1, lambda _: None) == []
    return int(found.progress["iteration"])


def check_lines(path: Path, expected: Path, first: int, last: int) -> None:
    """One whole line for every step, with the numbers of the undisturbed run to the bit."""
    lines, undisturbed = by_iteration(path), by_iteration(expected)
    assert list(lines) == list(range(first, last + 1)) and all(len(lines[each]) == 1 for each in lines)
    assert [same(line) for (line,) in lines.values()] == [same(undisturbed[each][0]) for each in lines]


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics of the run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with live(folder, flags_of(corpus, folder / "cache", folder / "saved", folder / "m"), []) as run:
        assert run.ends() == 0, run.told()
    return folder / "m"


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
def test_a_run_goes_on_through_faults(undisturbed: Path, corpus: Path, tmp_path: Path) -> None:
    """Ranks stopped for longer than their looks at each other, clocks hours off, a full disk, a read-only one, data
    deleted, no reader.
    """
    folder, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    for file in (f"{corpus}.bin", f"{corpus}.idx"):
        shutil.copy(file, data)
    pipe, saved, metrics = str(folder / "pipe"), tmp_path / "disk" / "saved", folder / "m"
    jumps = [Jump("step", 2, rank, pipe, hours) for rank, hours in ((0, HOURS), (1, -HOURS))]
    pauses = [
        Pause("step", iteration, rank, pipe) for iteration, rank in ((3, 0), (4, 1), (6, 0), (8, 1), (9, 0), (10, 1))
    ]
    flags = flags_of(data / corpus.name, data / "cache", saved, metrics)
    with small_disk(tmp_path / "disk", 8 << 20) as disk, live(folder, flags, [*jumps, *pauses]) as run:
        first = run.arrives()
        assert sorted(by_iteration(metrics)) == [1, 2] and whole(saved) == 2
        ranks = children(run.process.pid)
        assert len(ranks) == 2 and first in ranks
        for pid in ranks:  # one of them stands in its step, the other waits for it
            os.kill(pid, signal.SIGSTOP)
        run.goes_on()
        time.sleep(1)  # the fault itself: five times as long as a rank waits between two looks
        assert all(map(stopped, ranks)) and sorted(by_iteration(metrics)) == [1, 2]
        for pid in reversed(ranks):
            os.kill(pid, signal.SIGCONT)

        run.arrives()
        ballast = fill(disk)
        run.goes_on()
        run.arrives()
        assert f"{UNWRITTEN.format(4)}: [Errno 28] No space left on device" in run.told()
        assert whole(saved) == 2
        ballast.unlink()
        remount(disk, "ro")
        run.goes_on()
        run.arrives()
        assert f"{UNWRITTEN.format(6)}: [Errno 30] Read-only file system" in run.told()
        assert whole(saved) == 2
        remount(disk, "rw")
        run.goes_on()

        run.arrives()
        assert whole(saved) == 8
        shutil.rmtree(data)
        run.goes_on()
        run.arrives()
        run.hang_up()
        run.goes_on()
        assert run.ends() == 0
        assert whole(saved) == STEPS and sorted(path.name for path in saved.glob(".*")) == []
        check_lines(metrics, undisturbed, 1, STEPS)
        seconds = [line["step_seconds"] for lines in by_iteration(metrics).values() for line in lines]
        assert all(0 < each < SECONDS for each in seconds) and seconds[2] > 1, "the third step was stopped"


@pytest.mark.slow
def test_a_run_whose_folder_is_deleted_says_so(undisturbed: Path, corpus: Path, tmp_path: Path) -> None:
    folder, kept = tmp_path / "run", tmp_path / "kept"
    pipe, saved, metrics = str(folder / "pipe"), folder / "saved", folder / "m"
    cache = undisturbed.parent / "cache"
    with live(folder, flags_of(corpus, cache, saved, metrics), [Pause("step", 4, 0, pipe)]) as run:
        run.arrives()
        assert whole(saved) == 2
        saved.rename(kept)
        run.goes_on()
        assert run.ends() == 1
        told = run.told()
    assert f"FenceLost: {saved} is gone: it was deleted, moved or unmounted while the run went on" in told
    assert told.count("Traceback") == 1 and "belongs to" not in told and "another job" not in told
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [], "nothing is written in its place"
    check_lines(metrics, undisturbed, 1, 3)

    again = tmp_path / "again"
    with live(again, flags_of(corpus, cache, kept, again / "m"), []) as run:
        assert run.ends() == 0, run.told()
        assert f"{kept}/iter_0000002, iteration 2" in " ".join(run.told().split()), "the banner breaks long lines"
    assert whole(kept) == STEPS
    check_lines(again / "m", undisturbed, 3, STEPS)
