"""Pieces as plain files: what is read is what was written, in order, and each fault is one clear error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.disk.plain_files import OWNER, PREFIX, PlainFiles, folder_of, open_files, remove_unused
from megazero.disk.swap_file import DiskError, SwapDamaged
from tests.disks import remount, small_disk

PIECES = {"first": 300_001, "second, part 1: gradient": 8 * 4096}


def content(name: str, seed: int) -> Tensor:
    return torch.randint(0, 256, (PIECES[name],), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[PlainFiles]:
    opened = open_files([tmp_path], PIECES, job="job", rank=3)
    yield opened
    opened.close(remove=True)


def file_of(files: PlainFiles, name: str) -> Path:
    return files.path / f"piece-{[*PIECES].index(name):06d}"


def test_what_is_read_is_what_was_written_last(files: PlainFiles, tmp_path: Path) -> None:
    name, other = PIECES
    written = [content(name, seed) for seed in range(5)]
    for values in written[:-1]:
        files.write({name: values})
    files.write({other: content(other, 9), name: written[-1]})
    read = {each: torch.zeros(count, dtype=torch.uint8) for each, count in PIECES.items()}
    files.read(read).wait()
    assert torch.equal(read[name], written[-1]) and torch.equal(read[other], content(other, 9))
    assert file_of(files, name).read_bytes() == bytes(written[-1].numpy())
    assert files.bytes_read == files.file_bytes == sum(PIECES.values())
    assert files.bytes_written == 5 * PIECES[name] + PIECES[other]
    assert files.has(name) and not PlainFiles(tmp_path / "empty", PIECES).has(name)


def test_a_write_waits_for_the_readers_before_it(files: PlainFiles) -> None:
    """And a read for the write, and both for what else they need."""
    name, order = next(iter(PIECES)), list[str]()
    files.write({name: content(name, 1)}, needs=[lambda: order.append("first write")])
    read = torch.zeros(PIECES[name], dtype=torch.uint8)
    files.read({name: read}, needs=[lambda: order.append("read")])
    files.write({name: content(name, 2)}, needs=[lambda: order.append("second write")]).wait()
    assert torch.equal(read, content(name, 1)) and order == ["first write", "read", "second write"]


def test_a_write_waits_for_the_write_before_it(files: PlainFiles) -> None:
    """Two threads write: the second one begins nothing while the first one still has to."""
    began, seen = threading.Event(), list[bool]()
    files.write({"first": content("first", 1)}, needs=[lambda: seen.append(began.wait(0.3))])
    files.write({"first": content("first", 2)}, needs=[began.set]).wait()
    assert seen == [False]


def test_tensors_of_every_dtype_are_bytes(tmp_path: Path) -> None:
    files = open_files([tmp_path], {"piece": 4096}, job="job", rank=0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.arange(4096 // dtype.itemsize).to(dtype) - 7
        files.write({"piece": values})
        read = torch.zeros_like(values)
        files.read({"piece": read}).wait()
        assert torch.equal(read, values)
    files.close(remove=True)
    assert [*tmp_path.iterdir()] == []


def test_a_piece_that_was_never_written(files: PlainFiles) -> None:
    with pytest.raises(DiskError, match=f"{files.path}: piece 'first' has never been written"):
        files.read({"first": content("first", 0)})


@pytest.mark.parametrize("at", [0, 65_536, 300_000])
def test_a_changed_bit_is_a_clear_error(files: PlainFiles, at: int) -> None:
    files.write({"first": content("first", 1)}).wait()
    path = file_of(files, "first")
    changed = bytearray(path.read_bytes())
    changed[at] ^= 1
    path.write_bytes(changed)
    with pytest.raises(SwapDamaged) as raised:
        files.read({"first": content("first", 0)}).wait()
    said = str(raised.value)
    assert said.startswith(f"{path}: piece 'first' of 300,001 bytes has the checksum ") and said.endswith("was written")


def test_a_file_that_ends_early(files: PlainFiles) -> None:
    files.write({"first": content("first", 1)}).wait()
    os.truncate(file_of(files, "first"), 70_000)
    with pytest.raises(SwapDamaged) as raised:
        files.read({"first": content("first", 0)}).wait()
    where = f"{file_of(files, 'first')}: reading piece 'first': 70,000 of 300,001 bytes were read"
    assert str(raised.value) == f"{where}: the file ends there"


def test_a_folder_that_vanishes(files: PlainFiles) -> None:
    """The file stays open for no request, so that no byte goes to a file that nobody can read."""
    files.write({"first": content("first", 1)}).wait()
    shutil.rmtree(files.path)
    for request, what in ((files.read, "reading"), (files.write, "writing")):
        with pytest.raises(DiskError) as raised:
            request({"first": content("first", 0)}).wait()
        where = f"{file_of(files, 'first')}: {what} piece 'first' of 300,001 bytes"
        assert str(raised.value) == f"{where}: No such file or directory (errno 2)"


@pytest.mark.slow
def test_a_full_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256 * 1024) as disk:
        files = open_files([disk], PIECES, job="job", rank=0)
        with pytest.raises(DiskError) as raised:
            files.write({"first": content("first", 1)}).wait()
        said = str(raised.value)
        assert said.startswith(f"{file_of(files, 'first')}: writing piece 'first': ")
        assert "of 300,001 bytes were written: the disk is full: No space left on device (errno 28)" in said
        files.close(remove=True)
        assert [*disk.iterdir()] == []


@pytest.mark.slow
def test_a_read_only_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        files = open_files([disk], PIECES, job="job", rank=0)
        files.write({"first": content("first", 1)}).wait()
        remount(disk, "ro")
        with pytest.raises(DiskError, match="writing piece 'first' of 300,001 bytes: the file system is read-only"):
            files.write({"first": content("first", 2)}).wait()
        with pytest.raises(
            DiskError, match=f"{PREFIX}more-00000: the folder for plain files cannot be made: the file sy"
        ):
            open_files([disk], PIECES, job="more", rank=0)
        remount(disk, "rw")
        files.close(remove=True)


KILLED = """
import os, signal, sys
from pathlib import Path
from megazero.disk.plain_files import open_files
open_files([Path(sys.argv[1])], {"piece": 10}, job="killed", rank=0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}killed-00000"]
    files = open_files([tmp_path], PIECES, job="job", rank=0)
    assert [*tmp_path.iterdir()] == [files.path] and files.backend == f"plain files in {tmp_path}, by threads"
    files.close(remove=True)


@pytest.mark.parametrize("change", [{"boot": "another host's"}, {"namespace": "pid:[7]"}, {}, None])
def test_what_may_be_in_use_stays_and_is_told(change: dict[str, str] | None, tmp_path: Path) -> None:
    """Of another host, of another container, and of nobody. What a living process has is not told of: it is no
    left-over, and may be this run's own, which has another job for its activations.
    """
    others = open_files([tmp_path], PIECES, job="others", rank=0)
    owner = others.path / OWNER
    if change is None:
        owner.unlink()
    else:
        gone = {"process": 2**22 + 1} if change else {}
        owner.write_text(json.dumps({**json.loads(owner.read_text()), **change, **gone}))
    files = open_files([tmp_path], PIECES, job="job", rank=0)
    assert others.path.is_dir()
    told = f"a folder is there of other runs ({tmp_path}/{PREFIX}*): if they have ended, delete what they have left"
    assert files.backend.endswith(told if change != {} else "by threads")
    for each in (files, others):
        each.close(remove=True)


def test_the_other_ranks_of_a_run_are_none_of_other_runs(tmp_path: Path) -> None:
    one, two = (open_files([tmp_path], PIECES, job="job", rank=rank) for rank in (0, 1))
    assert one.backend == two.backend
    remove_unused([tmp_path], "job", 0)
    assert [*tmp_path.iterdir()] == [folder_of(tmp_path, "job", 1)]
    one.close(remove=True)
    two.close(remove=True)
    two.close(remove=True)
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(DiskError, match="the files are closed"):
        two.write({"first": content("first", 1)})
