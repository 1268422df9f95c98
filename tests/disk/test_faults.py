"""What goes wrong with disks: each fault is one clear error, nothing hangs, the last whole step can still be read."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero.disk import swap_file, transports
from megazero.disk.opening import open_swap
from megazero.disk.swap import SwapSpace
from megazero.disk.swap_file import DiskError, SwapDamaged
from megazero.disk.transports import DiskOptions
from tests.disk.contents import contents, empty, opened, place, read_all, same
from tests.disks import fill, remount, small_disk

BUFFER = 1 << 16
PIECES = {"weights": 7 * BUFFER + 1000, "moments": 3 * BUFFER}


@contextmanager
def one_step(folder: Path, options: DiskOptions) -> Iterator[SwapSpace]:
    """Swap files with a whole step 1. It must still be there at the end, for this process and for the next."""
    space = opened(folder, PIECES, options)
    space.write(contents(PIECES, 1))
    space.flip(1).wait()
    yield space
    space.close(remove=False)
    again = opened(folder, PIECES, options, resume=True)
    assert again.record is not None and again.record.last.step == 1
    assert same(read_all(again, PIECES), contents(PIECES, 1))
    again.close(remove=True)


def fails_for_good(space: SwapSpace, said: str) -> DiskError:
    """Step 2 cannot be written, and says why; neither can step 3, after the fault has gone."""
    writes = [space.write({name: one}) for name, one in contents(PIECES, 2).items()]
    with pytest.raises(DiskError, match=said) as caught:
        for request in [*writes, space.flip(2)]:
            request.wait()
    with pytest.raises(DiskError, match="nothing more is written after an earlier failure"):
        space.flip(3).wait()
    return caught.value


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, options: DiskOptions) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        with pytest.raises(DiskError, match=r"00000.bin: 1,\d\d\d,\d\d\d bytes are needed, .* free: the disk is full"):
            opened(folder, PIECES, options)
        assert list(folder.iterdir()) == []


def test_a_disk_that_fills_in_the_middle_of_a_step(
    tmp_path: Path, options: DiskOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file system that allocates when it is written to."""
    monkeypatch.setattr(swap_file, "_allocate", os.ftruncate)
    with small_disk(tmp_path / "disk", 2 << 20) as folder, one_step(folder, options) as space:
        ballast = fill(folder)
        error = fails_for_good(space, r"writing piece 'weights': [\d,]+ of 65,536 bytes at byte [\d,]+ were written: ")
        assert error.code == errno.ENOSPC and "the disk is full" in str(error)
        ballast.unlink()


def test_a_limit_of_file_sizes_in_the_middle_of_a_chunk(tmp_path: Path, options: DiskOptions) -> None:
    """The system writes the part below the limit: a short write, which is resumed, and then an error."""
    with one_step(tmp_path, replace(options, depth=1)) as space:
        _, offset = place(space, "weights", 1)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (offset + 2 * BUFFER + 8192, limits[1]))
        try:
            error = fails_for_good(space, r"writing piece 'weights'.* a limit on the size of files")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert error.code == errno.EFBIG
        assert f": 8,192 of 65,536 bytes at byte {offset + 2 * BUFFER:,} were written" in str(error)


def test_a_file_that_ends_early(tmp_path: Path, options: DiskOptions) -> None:
    space = opened(tmp_path, PIECES, options)
    space.write(contents(PIECES)).wait()
    path, offset = place(space, "moments", 0)
    for end in (offset + BUFFER + 8192, offset + BUFFER + 5000, offset + BUFFER, offset - 3000):
        os.truncate(path, end)
        with pytest.raises(
            SwapDamaged, match=f"moments.*the file has {end:,} bytes, not the {space.file_bytes:,} with"
        ):
            space.read(empty(PIECES, ["moments"])).wait()
    space.flip(1).wait()
    space.close(remove=False)
    with pytest.raises(SwapDamaged, match=f"has {end:,} bytes, not the"):
        opened(tmp_path, PIECES, options, resume=True)


@pytest.mark.parametrize("at", [0, BUFFER + 777, 7 * BUFFER + 999])
def test_one_flipped_bit(tmp_path: Path, options: DiskOptions, at: int) -> None:
    with one_step(tmp_path, options) as space:
        path, offset = place(space, "weights", 0)
        with path.open("r+b") as file:
            file.seek(offset + at)
            byte = file.read(1)[0]
            file.seek(offset + at)
            file.write(bytes([byte ^ 16]))
        said = (
            rf"00000.bin at byte {offset:,}: piece 'weights' of 459,752 bytes has the checksum [0-9a-f]+; [0-9a-f]+ was"
        )
        with pytest.raises(SwapDamaged, match=said):
            space.read(empty(PIECES)).wait()
        moments = empty(PIECES, ["moments"])
        space.read(moments).wait()
        assert same(moments, {"moments": contents(PIECES, 1)["moments"]}), "the other piece is whole"
        with path.open("r+b") as file:
            file.seek(offset + at)
            file.write(bytes([byte]))


def test_a_disk_that_says_no(tmp_path: Path, options: DiskOptions) -> None:
    """Its descriptor leads to /dev/full in the middle of a run, and reads fail where it leads to a folder."""
    with one_step(tmp_path, options) as space:
        handle = space._files[0].handle
        kept, full, folder = os.dup(handle), os.open("/dev/full", os.O_RDWR), os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, handle)
        with pytest.raises(DiskError, match=r"reading piece 'weights': 0 of 65,536 .* \(errno \d+\)"):
            space.read(empty(PIECES)).wait()
        os.dup2(full, handle)
        fails_for_good(space, r"writing piece 'weights': 0 of 65,536 bytes .*\(errno \d+\)")
        os.dup2(kept, handle)
        for other in (kept, full, folder):
            os.close(other)
        with pytest.raises(DiskError, match="writing piece"):
            read_all(space, PIECES)  # what was to be read was not written, and the earlier step is not taken for it


def test_a_file_that_vanishes(tmp_path: Path, options: DiskOptions) -> None:
    folder = tmp_path / "gone"
    with pytest.raises(DiskError, match="gone: there is no such folder"):
        opened(folder, PIECES, options)
    folder.mkdir()
    space = opened(folder, PIECES, options)
    space.write(contents(PIECES)).wait()
    shutil.rmtree(folder)
    with pytest.raises(DiskError, match=r"00000.bin: has been removed"):
        space.flip(1).wait()
    space.close(remove=True)


def test_a_read_only_disk(tmp_path: Path, options: DiskOptions) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as folder:
        remount(folder, "ro")
        with pytest.raises(DiskError, match="cannot be opened: the file system is read-only"):
            opened(folder, PIECES, options)
        remount(folder, "rw")
        with one_step(folder, options) as space:
            space.write(contents(PIECES, 2)).wait()
            (folder / "megazero-swap-test-00000.json").rename(folder / "kept")
            (folder / "megazero-swap-test-00000.json").mkdir()
            with pytest.raises(DiskError, match=r"json: the record of step 2 cannot be written: Is a directory"):
                space.flip(2).wait()
            (folder / "megazero-swap-test-00000.json").rmdir()
            (folder / "kept").rename(folder / "megazero-swap-test-00000.json")


def test_folders_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DiskError, match=r"file/megazero-swap-test-00000.bin: cannot be opened: Not a directory"):
        opened(file, PIECES, DiskOptions())
    for folders in ([], [tmp_path, tmp_path / ".." / tmp_path.name]):
        with pytest.raises(ValueError, match="swap files need folders, each named once"):
            open_swap(folders, PIECES, job="test")
    for job in ("", "a/b"):
        with pytest.raises(ValueError, match="is no name of a job"):
            open_swap([tmp_path], PIECES, job=job)


def test_a_file_system_without_o_direct(tmp_path: Path) -> None:
    """ramfs is one. Its pages are memory, and the threads read and write them."""
    folder = tmp_path / "ram"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "ramfs", "ramfs", folder], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a ramfs cannot be mounted: {mounted.stderr}")
    try:
        with one_step(folder, DiskOptions(BUFFER, 2)) as space:
            assert space.backend == f"threads with the page cache (the file system of {folder} refuses O_DIRECT)"
    finally:
        subprocess.run(["umount", folder], check=True)


def interrupted(real: Callable[..., int], counts: list[int]) -> Callable[..., int]:
    """A read or write that moves one or two pages, and every third time is handed back an odd number of bytes."""

    def some(file: int, memory: Any, offset: int) -> int:
        counts.append(offset)
        whole = 4096 * (1 + len(counts) % 2)
        moved = real(file, memoryview(memory)[:whole], offset)
        return moved - 100 if len(counts) % 3 == 0 and moved == 8192 else moved

    return some


def test_short_reads_and_writes_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(transports, "read_at", interrupted(transports.read_at, counts))
    monkeypatch.setattr(os, "pwrite", interrupted(os.pwrite, counts))
    with one_step(tmp_path, DiskOptions(BUFFER, 4, "threads")) as space:
        assert same(read_all(space, PIECES), contents(PIECES, 1))
    chunks = 3 * (8 + 3)
    assert len(counts) > 8 * chunks


def test_reads_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = transports.read_at, []

    def read(file: int, memory: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 5:
            raise OSError(errno.EIO, "x")
        return real(file, memory, offset)

    with one_step(tmp_path, DiskOptions(BUFFER, 2, "threads")) as space:
        monkeypatch.setattr(transports, "read_at", read)
        with pytest.raises(
            DiskError, match=r"reading piece '\w+': 0 of .* were read: the disk reports an error"
        ) as caught:
            space.read(empty(PIECES)).wait()
        assert caught.value.code == errno.EIO and len(calls) <= 7, "what had not begun is left out"
        assert same(read_all(space, PIECES), contents(PIECES, 1))


@pytest.mark.slow
def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, answer = transports.read_at, threading.Event()

    def read(file: int, memory: Any, offset: int) -> int:
        answer.wait()
        return real(file, memory, offset)

    monkeypatch.setattr(transports, "read_at", read)
    others = set(threading.enumerate())
    with one_step(tmp_path, DiskOptions(BUFFER, 1, "threads", seconds=1)) as space:
        workers = set(threading.enumerate()) - others
        with pytest.raises(DiskError, match="no answer for 1 s, with 1 requests under way"):
            space.read(empty(PIECES)).wait()
        with pytest.raises(DiskError, match="its threads have failed before"):
            space.read(empty(PIECES)).wait()
        answer.set()
        space.close(remove=False)
        for worker in workers:  # a read that is still under way keeps the lock of a file that has been closed
            worker.join()
