"""What waits for what, with one of them held back: no luck of timing decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megazero.disk import transports
from megazero.disk.lanes import DiskRequest
from megazero.disk.swap import SwapRecord, SwapSpace
from megazero.disk.swap_file import SwapFile
from megazero.disk.transports import DiskOptions
from tests.disk.contents import contents, empty, opened, read_all, same

PIECES = {"a": 70_000, "b": 5000}


class Gate:
    """Calls of a function wait until it is opened."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.open, self._real = threading.Event(), real

    def __call__(self, *given: Any) -> Any:
        self.open.wait(20)
        return self._real(*given)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[SwapSpace]:
    made = opened(tmp_path, PIECES, DiskOptions(1 << 16, 4, "threads"))
    yield made
    made.close(remove=True)


def waits(request: DiskRequest) -> bool:
    """Whether it is not done after a time in which it easily could be."""
    threading.Event().wait(0.15)
    return not request.done()


def test_a_write_after_a_flip_waits_until_the_record_is_there(
    space: SwapSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that the record points to the slot that it writes."""
    gate = Gate(SwapRecord.write)
    monkeypatch.setattr(SwapRecord, "write", lambda *given: gate(*given))
    space.write(contents(PIECES, 1)).wait()
    flip, write = space.flip(1), space.write(contents(PIECES, 2))
    assert waits(write) and waits(flip)
    gate.open.set()
    write.wait()
    assert same(read_all(space, PIECES), contents(PIECES, 2))


def test_a_write_waits_for_the_read_of_what_it_replaces(space: SwapSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    space.write(contents(PIECES, 1)).wait()
    gate = Gate(transports.read_at)
    monkeypatch.setattr(transports, "read_at", gate)
    memory = empty(PIECES)
    read, write = space.read(memory), space.write(contents(PIECES, 2))
    other = space.write(contents(PIECES, 3))
    assert waits(write) and waits(other)
    gate.open.set()
    read.wait()
    assert same(memory, contents(PIECES, 1))
    other.wait()
    assert same(read_all(space, PIECES), contents(PIECES, 3))


def test_a_write_waits_for_every_read(space: SwapSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two is slow, the second is over."""
    space.write(contents(PIECES, 1)).wait()
    gate, real = Gate(transports.read_at), transports.read_at
    monkeypatch.setattr(transports, "read_at", gate)
    first, second = empty(PIECES, ["a"]), empty(PIECES, ["a"])
    slow = space.read(first)
    assert waits(slow)
    monkeypatch.setattr(transports, "read_at", real)
    space.read(second).wait()
    write = space.write(contents(PIECES, 2))
    assert waits(write)
    gate.open.set()
    slow.wait()
    write.wait()
    assert same(first, second) and same(read_all(space, PIECES), contents(PIECES, 2))


def test_a_read_waits_for_the_write_before_it(space: SwapSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    space.write(contents(PIECES, 1)).wait()
    gate = Gate(transports.os.pwrite)
    monkeypatch.setattr(transports.os, "pwrite", gate)
    space.write(contents({"a": PIECES["a"]}, 2))
    memory, other = empty(PIECES, ["a"]), empty(PIECES, ["b"])
    read = space.read(memory)
    space.read(other).wait()
    assert waits(read) and same(other, contents({"b": PIECES["b"]}, 1)), "other pieces need not wait"
    gate.open.set()
    read.wait()
    assert same(memory, contents({"a": PIECES["a"]}, 2))


def test_a_flip_waits_for_every_write(space: SwapSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(transports.os.pwrite)
    synced: list[SwapFile] = []
    monkeypatch.setattr(transports.os, "pwrite", gate)
    monkeypatch.setattr(SwapFile, "sync", lambda file: synced.append(file))
    space.write(contents({"b": PIECES["b"]}))
    flip = space.flip(4)
    assert waits(flip) and space.record is None and not synced, "what is not written cannot be made durable"
    gate.open.set()
    flip.wait()
    assert len(synced) == 1
    assert space.record is not None and list(space.record.last.versions) == ["b"]
