"""Pieces in swap files: what is read is what was written, in every way of moving bytes."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megazero.disk.buffers import own_pages
from megazero.disk.measure import DiskTrial
from megazero.disk.opening import open_swap, record_of
from megazero.disk.swap import SwapRecord
from megazero.disk.swap_file import DiskError, SwapDamaged
from megazero.disk.transports import DiskOptions
from tests.disk.contents import content, contents, empty, opened, place, read_all, same
from tests.forks import fork

BUFFER = 1 << 16
SIZES = 1, 4095, 4096, 4097, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER + 5
PIECES = {f"p{count}": count for count in SIZES}


def test_pieces_of_every_size_come_back(tmp_path: Path, options: DiskOptions) -> None:
    space, wanted = opened(tmp_path, PIECES, options), contents(PIECES)
    space.write(wanted).wait()
    assert same(read_all(space, PIECES), wanted)
    assert space.bytes_written == space.bytes_read == sum(-(-count // 4096) * 4096 for count in SIZES)
    raw = space.paths[0].read_bytes()
    for name, count in PIECES.items():
        _, offset = place(space, name, 0)
        assert raw[offset + count : offset - (-count // 4096) * 4096] == bytes(-count % 4096), "zeros up to the page"
        one = empty(PIECES, [name])
        space.read(one).wait()
        assert torch.equal(one[name], wanted[name])
    space.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_many_requests_in_flight_each_see_what_was_written_before_them(tmp_path: Path, options: DiskOptions) -> None:
    """Reads and writes of the same pieces, one behind the other, without a wait between them."""
    pieces = {"a": BUFFER * 2 + 77, "b": 5000}
    space = opened(tmp_path, pieces, options)
    requests, found = [], []
    for step in range(12):
        requests.append(space.write(contents(pieces, step)))
        found.append(empty(pieces))
        requests.append(space.read(found[-1]))
        if step % 3 == 2:
            requests.append(space.flip(step))
    for request in requests:
        request.wait()
    assert all(same(found[step], contents(pieces, step)) for step in range(12))
    assert space.record is not None and space.record.last.step == 11
    space.close(remove=True)


def test_a_view_of_other_memory_and_another_dtype(tmp_path: Path, options: DiskOptions) -> None:
    """Odd addresses; bytes around the piece stay."""
    space = opened(tmp_path, {"x": 4 * 999}, options)
    wanted = torch.arange(999, dtype=torch.float32) / 7
    space.write({"x": wanted}).wait()
    memory = torch.full((4 * 999 + 8,), 3, dtype=torch.uint8)
    space.read({"x": memory[3:-5]}).wait()
    assert torch.equal(memory[3:-5].clone().view(torch.float32), wanted)
    assert memory[:3].eq(3).all() and memory[-5:].eq(3).all()
    space.close(remove=True)


def test_memory_of_the_space_goes_without_buffers(tmp_path: Path, options: DiskOptions) -> None:
    """In requests of two buffers' size. All but the ends of pieces that are no whole pages; and a piece that begins
    elsewhere in it.
    """
    pieces = {"whole": 3 * BUFFER, "odd": 3 * BUFFER + 5, "shifted": 2 * BUFFER}
    space = opened(tmp_path, pieces, options)
    memory = {name: space.allocate(count + 64) for name, count in pieces.items()}
    tensors = {name: memory[name][: pieces[name]] for name in ("whole", "odd")}
    tensors["shifted"] = memory["shifted"][64:]
    plan = space._moves(list(tensors.values()), tensors, [0, 0, 0])
    assert [[move.direct for move in plan if move.piece == piece] for piece in range(3)] == [[1, 1], [1, 1, 0], [0, 0]]
    for step in (1, 2):
        for name, tensor in tensors.items():
            tensor.copy_(content(name, pieces[name], step))
        space.write(tensors).wait()
        for one in memory.values():
            one.fill_(7)
        space.read(tensors).wait()
        assert same(tensors, contents(pieces, step)) and same(read_all(space, pieces), contents(pieces, step))
        assert memory["odd"][-64:].eq(7).all() and memory["shifted"][:64].eq(7).all()
    child = fork()
    if not child:
        faulthandler.disable()
        os._exit(int(memory["whole"][0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV, "a fork has none of it"
    path, offset = place(space, "whole", 0)
    with path.open("r+b") as file:
        file.seek(offset + BUFFER)
        file.write(b"\0\0")
    with pytest.raises(SwapDamaged, match="piece 'whole'"):
        space.read(tensors).wait()
    space.close(remove=True)


def test_memory_for_disks_may_have_large_pages() -> None:
    """Kernels give none to shared memory, which Python's mmap makes unless it is told otherwise."""
    with own_pages(4 << 20) as pages:
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(pages))
        maps = Path("/proc/self/smaps").read_text().split("VmFlags: ")
    for fields, flags in pairwise(maps):
        (bounds,) = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", fields, re.MULTILINE)
        if int(bounds[0], 16) <= address < int(bounds[1], 16):
            assert "sh" not in flags.splitlines()[0].split()
            return
    raise AssertionError("the memory is in no map")


def test_a_run_goes_on_from_the_last_flip(tmp_path: Path, options: DiskOptions) -> None:
    pieces = {"a": 70_000, "b": 4096, "c": 9}
    space = opened(tmp_path, pieces, options)
    space.write(contents(pieces, 1))
    space.flip(1, {"consumed_samples": 32})
    space.write(contents({"a": 70_000}, 2))
    space.flip(2, {"consumed_samples": 64})
    space.write(contents(pieces, 3)).wait()  # not flipped
    space.close(remove=False)
    other = DiskOptions(2 * BUFFER, 1, options.backend)
    again = opened(tmp_path, pieces, other, resume=True)
    assert again.record is not None
    assert (again.record.last.step, again.record.last.about) == (2, {"consumed_samples": 64})
    assert same(read_all(again, pieces), contents({"a": 70_000}, 2) | contents({"b": 4096, "c": 9}, 1))
    again.write(contents(pieces, 3))
    again.flip(3).wait()
    again.close(remove=False)
    once_more = opened(tmp_path, pieces, options, resume=True)
    assert same(read_all(once_more, pieces), contents(pieces, 3))
    once_more.close(remove=True)


def test_ranks_that_were_killed_between_their_flips_go_on_from_the_step_that_all_have(
    tmp_path: Path, options: DiskOptions
) -> None:
    pieces = {"a": 70_000, "b": 4096}
    for rank, steps in ((0, (6, 7, 8)), (1, (6, 7))):
        space = opened(tmp_path, pieces, options, rank=rank, resume=True)
        for step in steps:
            space.write(contents(pieces, step))
            space.flip(step, {"step": step}).wait()
        space.close(remove=False)
    records = [record_of([tmp_path], "test", rank) for rank in (0, 1)]
    assert [record and record.last.step for record in records] == [8, 7]
    with pytest.raises(DiskError, match=r"00001.json: has no step 8, but 7 and 6"):
        opened(tmp_path, pieces, options, rank=1, resume=True, step=8)
    for rank in (0, 1):
        space = opened(tmp_path, pieces, options, rank=rank, resume=True, step=7)
        assert space.record is not None and space.record.last.about == {"step": 7}
        assert same(read_all(space, pieces), contents(pieces, 7))
        space.write(contents({"a": 70_000}, 8)).wait()  # killed again, before it flips
        space.close(remove=False)
        left = record_of([tmp_path], "test", rank)
        assert left is not None and left.last.step == 7 and (rank == 1 or left.earlier is None)
        again = opened(tmp_path, pieces, options, rank=rank, resume=True)
        assert same(read_all(again, pieces), contents(pieces, 7))
        again.close(remove=True)
    assert record_of([tmp_path], "test", 0) is None


def test_without_resume_the_earlier_step_is_gone(tmp_path: Path, options: DiskOptions) -> None:
    pieces = {"a": 5000}
    space = opened(tmp_path, pieces, options)
    space.write(contents(pieces))
    space.flip(1).wait()
    space.close(remove=False)
    fresh = opened(tmp_path, pieces, options)
    with pytest.raises(DiskError, match="piece 'a' has never been written"):
        fresh.read(empty(pieces))
    fresh.close(remove=False)
    nothing = opened(tmp_path, pieces, options, resume=True)
    assert nothing.record is None
    nothing.close(remove=True)


def test_one_slot_takes_half_the_space_and_leaves_no_step(tmp_path: Path, options: DiskOptions) -> None:
    pieces = {"a": 40_960, "b": 100}
    space = opened(tmp_path, pieces, options, slots=1)
    assert space.file_bytes == 4096 + 40_960 + 4096
    for step in (1, 2):
        space.write(contents(pieces, step))
        space.flip(step).wait()
        assert same(read_all(space, pieces), contents(pieces, step))
    space.close(remove=False)
    assert [path.name for path in tmp_path.iterdir()] == ["megazero-swap-test-00000.bin"]


def test_several_paths_share_and_are_found_again(tmp_path: Path, options: DiskOptions) -> None:
    folders = [tmp_path / name for name in "xyz"]
    for folder in folders:
        folder.mkdir()
    pieces = {"a": 20 * BUFFER + 3, "b": 100, "c": 4 * BUFFER}
    space = open_swap(folders, pieces, options, job="test", weights=(2, 1, 1))
    sizes = [path.stat().st_size for path in space.paths]
    assert 1.9 < sizes[0] / sizes[1] < 2.1 and 1.9 < sizes[0] / sizes[2] < 2.1
    space.write(contents(pieces, 4))
    space.flip(4).wait()
    space.close(remove=False)
    again = open_swap(folders, pieces, options, job="test", resume=True)
    assert same(read_all(again, pieces), contents(pieces, 4))
    again.close(remove=True)
    assert not [path for folder in folders for path in folder.iterdir()]


def test_paths_are_measured_where_nobody_weighs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "x", tmp_path / "y"]
    for folder in folders:
        folder.mkdir()
    totals: list[int] = []
    init = DiskTrial.__init__

    def noted(self: DiskTrial, folder: Path, options: DiskOptions, total: int, piece_bytes: int) -> None:
        totals.append(total)
        init(self, folder, options, total, piece_bytes)

    monkeypatch.setattr("megazero.disk.measure.TRIAL_BYTES", (1 << 20, 4 << 20))
    monkeypatch.setattr("megazero.disk.measure.TRIAL_SECONDS", 0.05)
    monkeypatch.setattr(DiskTrial, "__init__", noted)
    space = open_swap(folders, {"a": 10 * BUFFER}, DiskOptions(BUFFER, 2), job="test")
    weights = space._layout.weights
    assert sum(weights) == pytest.approx(1) and all(weight > 0.02 for weight in weights) and weights != (0.5, 0.5)
    assert sorted(path.name for folder in folders for path in folder.iterdir()) == ["megazero-swap-test-00000.bin"] * 2
    space.close(remove=True)
    for held, slots, total in ((100, 2, 1 << 20), (1 << 20, 2, 2 << 20), (2 << 20, 1, 2 << 20), (3 << 20, 2, 4 << 20)):
        totals.clear()
        open_swap(folders, {"a": held}, DiskOptions(BUFFER, 2), job="test", slots=slots).close(remove=True)
        assert totals == [total] * 2  # as much as the paths will hold, between the least and the most


def test_sizes_are_checked(tmp_path: Path, options: DiskOptions) -> None:
    space = opened(tmp_path, {"a": 100}, options)
    wrong = {
        "the tensor has 99": {"a": torch.zeros(99, dtype=torch.uint8)},
        "not contiguous": {"a": torch.zeros(10, 20, dtype=torch.uint8)[:, ::2]},
        "there is no piece 'b'": {"b": torch.zeros(100, dtype=torch.uint8)},
        "on meta": {"a": torch.zeros(100, dtype=torch.uint8, device="meta")},
    }
    for said, tensors in wrong.items():
        for move in (space.read, space.write):
            with pytest.raises(ValueError, match=said):
                move(tensors)
    space.close(remove=True)
    for said, options_ in {"multiple of 65,536": (1000, 1), "it must be 1, or even": (1 << 16, 3)}.items():
        with pytest.raises(ValueError, match=said):
            DiskOptions(*options_)


def test_a_record_of_other_pieces_or_files_is_no_start(tmp_path: Path, options: DiskOptions) -> None:
    pieces = {"a": 100, "b": 200}
    space = opened(tmp_path, pieces, options)
    space.write(contents(pieces))
    space.flip(1).wait()
    space.close(remove=False)
    for other, said in (({"a": 100, "b": 201}, "b .200 bytes., b .201"), ({"b": 200, "a": 100}, "differ in the order")):
        with pytest.raises(DiskError, match=said):
            opened(tmp_path, other, options, resume=True)
    record = tmp_path / "megazero-swap-test-00000.json"
    kept = record.read_bytes()
    record.write_bytes(kept.replace(b'"step": 1', b'"step": 2'))
    with pytest.raises(SwapDamaged, match="json: its checksum is not that of its"):
        opened(tmp_path, pieces, options, resume=True)
    record.write_bytes(kept)
    read = SwapRecord.read(record)
    SwapRecord(**{**read.__dict__, "ids": ("0" * 16,)}).write(record)
    with pytest.raises(SwapDamaged, match="the record of other swap files"):
        opened(tmp_path, pieces, options, resume=True)
    record.write_bytes(kept)
    (tmp_path / "megazero-swap-test-00000.bin").unlink()
    with pytest.raises(SwapDamaged, match="bin: is missing"):
        opened(tmp_path, pieces, options, resume=True)


def test_a_fork_cannot_use_it_and_does_no_harm(tmp_path: Path, options: DiskOptions) -> None:
    pieces = {"a": 300_000}
    space, wanted = opened(tmp_path, pieces, options), contents(pieces)
    request = space.write(wanted)
    child = fork()
    if not child:
        said = []
        for use in (lambda: space.read(empty(pieces)), request.wait):
            try:
                use()
            except DiskError as error:
                said.append(str(error))
        space.close(remove=True)
        for lane in space._lanes._lanes:  # nor does what runs at its exit: other memory may lie where the buffers were
            for transport in lane.transports:
                transport.close = lambda: os._exit(3)  # type: ignore[method-assign]
        space._lanes.close()
        os._exit(0 if all("its fork" in text for text in said) and len(said) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same(read_all(space, pieces), wanted)
    space.close(remove=True)


def test_closing_ends_what_waits_and_everything_after_is_an_error(tmp_path: Path, options: DiskOptions) -> None:
    pieces = {"a": 40 * BUFFER}
    space = opened(tmp_path, pieces, options)
    requests = [space.write(contents(pieces, step)) for step in range(4)]
    space.close(remove=True)
    ended = [request.error for request in requests]
    assert all(request.done() for request in requests)
    assert any("closed before this was done" in str(error) for error in ended), "the last ones had not begun"
    with pytest.raises(DiskError, match="the files are closed"):
        space.write(contents(pieces))
    space.close(remove=True)


def test_a_program_that_forgets_it_ends(tmp_path: Path, way: str, options: DiskOptions) -> None:
    """With requests under way, by a fork that exits as a program does."""
    child = fork()
    if not child:
        space = opened(tmp_path, {"a": 10 * BUFFER}, options)
        for step in range(3):
            space.write({"a": content("a", 10 * BUFFER, step)})
        space._lanes.close()  # what happens at exit
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_record_is_plain_json(tmp_path: Path, options: DiskOptions) -> None:
    space = opened(tmp_path, {"a": 100}, options)
    space.write(contents({"a": 100}))
    space.flip(17, {"note": [1, "two"]}).wait()
    with pytest.raises(TypeError, match="not JSON serializable"):
        space.flip(18, {"note": torch.zeros(1)})
    digest, text = (tmp_path / "megazero-swap-test-00000.json").read_text().splitlines()
    found = json.loads(text)
    assert (found["last"]["step"], found["last"]["about"], list(found["last"]["versions"])) == (
        17,
        {"note": [1, "two"]},
        ["a"],
    )
    assert len(digest) == 64
    space.close(remove=True)
