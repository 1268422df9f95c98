"""Words and JSON of other people's files: what is too much is one error with the file's name, before any memory is
taken for it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config.dump import read_yaml
from megazero.config.lengths import Length, Measure
from megazero.system import reading
from megazero.system.reading import (
    BOUNDS,
    Unreadable,
    json_memory_bound,
    listed,
    parse_json,
    path_error,
    read_bytes,
    read_json,
    read_object,
    read_text,
    shown,
)


def test_json_of_bounded_depth() -> None:
    deep = BOUNDS.depth * "["
    assert parse_json(deep + "]" * BOUNDS.depth, "x") is not None
    for text in (f"[{deep}" + "]" * (BOUNDS.depth + 1), "[" * 100_000, '{"a":' * 5000):
        with pytest.raises(Unreadable, match=r"^x is (nested more than 100 deep|no JSON)"):
            parse_json(text, "x")
    assert parse_json(json.dumps({"text": "[" * 5000}), "x") == {"text": "[" * 5000}, "brackets in a text are none"


@pytest.mark.parametrize("text", ["9" * 301, "9" * 5000, '{"a": [' + "1" * 400 + "]}"])
def test_numbers_of_bounded_length(text: str) -> None:
    with pytest.raises(Unreadable, match="x is no JSON: it holds a number of"):
        parse_json(text, "x")


MANY = 20_000
SHAPES = {
    "empty objects": "[" + ",".join(["{}"] * MANY) + "]",
    "objects": "[" + ",".join(['{"":0}'] * MANY) + "]",
    "objects in objects": "[" + ",".join(['{"":{"":{"":{}}}}'] * MANY) + "]",
    "empty lists": "[" + ",".join(["[]"] * MANY) + "]",
    "lists": "[" + ",".join(["[0]"] * MANY) + "]",
    "letters": "[" + ",".join(['"\U0001f600"'] * MANY) + "]",
    "numbers": "[" + ",".join(["1e9"] * MANY) + "]",
    "whole numbers": "[" + ",".join(["999"] * MANY) + "]",
    "a vocabulary": json.dumps({f"{number:x}": number for number in range(MANY)}, separators=(",", ":")),
}


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_counted_before_they_are_made(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a text beforehand is what it takes, and not many times as much: else bounds would refuse real
    files, or nothing.
    """
    text = SHAPES[shape]
    tracemalloc.start()
    parse_json(text, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.9 * peak < json_memory_bound(text) < 5 * peak
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it is parsed"))
    with pytest.raises(
        Unreadable,
        match=rf"^x holds so many values that they may take {json_memory_bound(text):,} bytes of memory, "
        r"more than 1,000,000$",
    ):
        parse_json(text, "x", 1_000_000)


def test_a_hostile_index_takes_no_memory(tmp_path: Path) -> None:
    """A file as large as an index may be; its objects would take 1.5 GB."""
    text = "[" + "{}," * (BOUNDS.index // 3 - 1) + "0]"
    (tmp_path / "x").write_text(text)
    tracemalloc.start()
    with pytest.raises(
        Unreadable,
        match=r"x holds so many values that they may take 7,3\d\d,\d{3},\d{3} bytes of memory, more than 1,073,741,824",
    ):
        read_json(tmp_path / "x", BOUNDS.index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * BOUNDS.index


def test_a_large_vocabulary_is_read() -> None:
    """A million tokens and as many merges, four times those of any model, as far as counting goes."""
    assert json_memory_bound('"abcdefg":1234567,' * 1_000_000 + '["abc","defg"],' * 1_000_000) < BOUNDS.values


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unreadable, match="x has more than 1,000 bytes"):
        read_bytes(tmp_path / "x", 1000)


def test_a_file_whose_size_is_not_told_is_read_whole() -> None:
    """Those of /proc have a size of 0."""
    there = Path("/proc/version").read_bytes()
    assert read_bytes(Path("/proc/version"), 1000) == there and len(there) > 10
    with pytest.raises(Unreadable, match="version has more than 10 bytes"):
        read_bytes(Path("/proc/version"), 10)


def test_an_empty_file_takes_no_memory(tmp_path: Path) -> None:
    """It has no size, as a pipe has none, and the bound is no request."""
    (tmp_path / "empty").write_bytes(b"")
    assert read_bytes(tmp_path / "empty", 1 << 46) == b""


def test_a_pipe_of_several_blocks_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    content = bytes(range(251)) * 12_000
    for most, is_whole in ((len(content), True), (len(content) - 1, False)):
        writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(content))
        writer.start()
        with nullcontext() if is_whole else pytest.raises(Unreadable, match="has more than 3,011,999 bytes"):
            assert read_bytes(tmp_path / "pipe", most, piped=True) == content
        writer.join()


def test_a_pipe_is_read_to_the_bound(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for most in (300, 299):
        writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(b"abc" * 100))
        writer.start()
        if most == 300:
            assert read_bytes(tmp_path / "pipe", most, piped=True) == b"abc" * 100
        else:
            with pytest.raises(Unreadable, match="pipe has more than 299 bytes"):
                read_bytes(tmp_path / "pipe", most, piped=True)
        writer.join()


def test_settings_may_come_from_a_process() -> None:
    """`--config <(program)`, of which the shell makes the name of a pipe; the program may have ended by then."""
    reader, writer = os.pipe()
    os.write(writer, b"train_iters: 7")
    os.close(writer)
    assert read_yaml(f"/dev/fd/{reader}").settings == {"train_length": Length(7, Measure.ITERATIONS)}
    os.close(reader)
    assert read_yaml(os.devnull).settings == {} and not read_yaml(os.devnull).problems


def test_who_has_opened_a_pipe_may_take_long_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes only once the reader has looked, found nothing, and waits."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(reading, "BOUNDS", replace(BOUNDS, pipe_seconds=0))
    waits, block = threading.Event(), os.set_blocking

    def waiting(descriptor: int, blocking: bool) -> None:
        block(descriptor, blocking)
        waits.set()

    monkeypatch.setattr(reading.os, "set_blocking", waiting)
    holder = os.open(tmp_path / "pipe", os.O_RDWR)

    def write() -> None:
        assert waits.wait(60)
        os.write(holder, b"late")
        os.close(holder)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_bytes(tmp_path / "pipe", 10, piped=True) == b"late"
    writer.join()


def test_a_path_is_said_once() -> None:
    assert path_error("a/b/", Unreadable("a/b is missing")) == "a/b is missing"
    assert path_error(Path("a/b"), "a/b/c: no word") == "a/b/c: no word"
    assert path_error("~/a", f"{Path.home()}/a: no word") == f"{Path.home()}/a: no word"
    assert (
        path_error("a", "about: no word") == "a: about: no word"
        and path_error("a/b", "c: no word") == "a/b: c: no word"
    )


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (
        socket.socket(socket.AF_UNIX) as there,
        pytest.raises(Unreadable, match=r"socket cannot be read: No such device"),
    ):
        there.bind(str(tmp_path / "socket"))
        read_bytes(tmp_path / "socket", 10)
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path(os.devnull)):
        with pytest.raises(Unreadable, match=f"^{path} is a pipe or a device, and no file"):
            read_bytes(path, 10)
    with pytest.raises(Unreadable, match="pipe is a pipe or a device, and nobody writes into it"):
        read_bytes(tmp_path / "pipe", 10, piped=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "byte 0 is no UTF-8"),
        (b"[1]", "holds a list, not an object"),
        (b"", "is no JSON"),
        (None, "is missing"),
    ],
)
def test_what_is_no_object(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(Unreadable, match=f"x.json.* {message}"):
        read_object(tmp_path / "x.json", 100)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(tmp_path / "x", 10) == "{}"


def test_messages_are_short() -> None:
    assert len(shown("x" * 1_000_000)) < 100 and len(shown([["x" * 999] * 999] * 999)) < 5000
    assert listed(str(n) for n in range(1000)).endswith("18, 19")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16le", "utf-16be", "utf-32"])
def test_text_in_another_encoding_names_the_command(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("once upon a time".encode(encoding))
    with pytest.raises(Unreadable, match=rf"a\.txt is no text: byte \d is .*: iconv -f {encoding} -t utf-8"):
        read_text(tmp_path / "a.txt", 100)


def test_an_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(Unreadable, match=r"a\.txt is a zip archive, and no text: unzip unpacks it"):
        read_text(tmp_path / "a.txt", 100)
