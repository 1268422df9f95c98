"""Words and JSON of other people's files: what is too much is one error with the file's name, before any memory is taken for it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from megazero.reading import BOUNDS, Unreadable, listed, parse_json, read_bytes, read_object, read_text, shown


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


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unreadable, match="x has more than 1,000 bytes"):
        read_bytes(tmp_path / "x", 1000)


def test_a_pipe_is_read_to_the_bound(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(b"abc" * 100))
    writer.start()
    assert read_bytes(tmp_path / "pipe", 300) == b"abc" * 100
    writer.join()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "byte 0 is no UTF-8"), (b"[1]", "holds a list, not an object"), (b"", "is no JSON"), (None, "is missing")],
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
