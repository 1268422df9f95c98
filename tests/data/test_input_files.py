"""Which files of a folder are read, and what is said of the others."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from megazero.data.documents import RawDocument, text_of
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.input_files import ReaderOptions, find_files, is_json
from megazero.data.preprocess import PreprocessJob, preprocess
from megazero.data.progress import silent
from megazero.data.tokenizer import ByteTokenizer
from tests.tables import rows

ENDINGS = rows("""
a.jsonl | json
a.JSONL | json
a.Json | json
a.jl | json
a.jsonlines | json
a.jsonl.GZ | json
a.NDJSON.zst | json
a.txt | text
a.txt.gz | text
jsonl | text
a.jsonl.bak | text
""")


@pytest.mark.parametrize(("name", "kind"), ENDINGS)
def test_json_lines_by_their_ending(name: str, kind: str) -> None:
    assert is_json(Path("x") / name) == (kind == "json")


def test_a_folder_with_everything_in_it(tmp_path: Path) -> None:
    """Links are followed, also out of the folder and not in circles. The line names what is not read, and why."""
    folder, beside = tmp_path / "corpus", tmp_path / "beside"
    (folder / "sub" / "deep").mkdir(parents=True)
    (beside / "more").mkdir(parents=True)
    for path in ("z.txt", "sub/a.txt", "sub/deep/b.txt", ".hidden.txt", "sub/c.md"):
        (folder / path).write_text("text")
    (beside / "more" / "d.txt").write_text("text")
    (folder / "link").symlink_to(beside)
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "broken.txt").symlink_to(tmp_path / "gone")
    (beside / "e.txt").symlink_to(folder / "z.txt")
    os.mkfifo(folder / "pipe.txt")
    said: list[str] = []
    found = find_files([folder], ["*.txt"], said.append)
    assert [str(path.relative_to(folder)) for path in found] == [
        "link/e.txt",
        "link/more/d.txt",
        "sub/a.txt",
        "sub/deep/b.txt",
        "z.txt",
    ]
    (line,) = said
    assert line.startswith(f"{folder}: 5 files are read; not read: ")
    for part in (
        "1 hidden (.hidden.txt)",
        "1 links that lead nowhere (broken.txt)",
        "1 pipes, sockets or devices (pipe.txt)",
        "1 links to a folder above (sub/up)",
        "1 that match no --include *.txt (sub/c.md)",
    ):
        assert part in line
    assert said == [line], "once for each folder"


def test_nothing_to_read_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"no files in .*; not read: 1 links that lead nowhere \(x\.jsonl\)"):
        find_files([tmp_path])
    with pytest.raises(DataError, match=r"no file or folder .*x\.jsonl \(it is a link to .*gone, which is not there\)"):
        find_files([tmp_path / "x.jsonl"])


def test_upper_case_endings_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "f.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "hello"}\n'))
    (tmp_path / "g.jl").write_text('{"text": "world"}\n')
    preprocess([tmp_path], tmp_path / "out", PreprocessJob("byte", None), workers=1, report=silent)
    made = IndexedDataset(str(tmp_path / "out"))
    assert [ByteTokenizer().decode([*made[number]]) for number in range(len(made))] == ["hello", "world"]


def test_text_that_looks_like_json_lines(tmp_path: Path) -> None:
    """A warning at the first file, and the number at the end; none where the format is given, or the key is not it."""
    for name, text in (("a.data", '{"text": "one"}\n'), ("b.data", '{"text": "two"}\n'), ("c.data", "{brace}\n")):
        (tmp_path / name).write_text(text)
    said: list[str] = []
    job = PreprocessJob("byte", None)
    preprocess([tmp_path], tmp_path / "out", job, workers=1, report=said.append)
    warnings = [line for line in said if line.startswith("warning")]
    assert len(warnings) == 2 and "a.data is read as text and looks like JSON lines" in warnings[0]
    assert warnings[1].startswith("warning: 2 files that are read as text look like JSON lines")
    for reader in (ReaderOptions(format="text"), ReaderOptions(json_key="body")):
        said.clear()
        preprocess(
            [tmp_path / "a.data"],
            tmp_path / "out",
            PreprocessJob("byte", None, reader),
            workers=1,
            report=said.append,
            overwrite=True,
        )
        assert not [line for line in said if line.startswith("warning")]


LINES: tuple[tuple[object, str], ...] = (
    ({"text": None}, "holds null under --json-key 'text', and no text"),
    ({"text": ["a"]}, "holds a list under --json-key 'text', and no text"),
    ({"text": 3}, "holds a number under --json-key 'text', and no text"),
    ({"body": "a", "id": 1}, "has no text under --json-key 'text'; it holds body, id"),
    ({}, "has no text under --json-key 'text'; it holds no key"),
    ([{"text": "a"}], "is a list, and no object; a file of JSON lines has one object on each line: `jq -c '.[]' FILE`"),
    ("a", "is a string, and no object"),
)


@pytest.mark.parametrize(("line", "message"), LINES)
def test_a_line_without_text_says_what_is_there(line: object, message: str) -> None:
    raw = RawDocument("f.jsonl", 4, json.dumps(line).encode(), True, True)
    with pytest.raises(DataError) as said:
        text_of(raw, "text", "strict")
    assert str(said.value).startswith(f"f.jsonl, line 4 {message}")


@pytest.mark.parametrize("line", ["[", "[{", "{", '{"text": "a",'])
def test_values_that_span_lines(line: str) -> None:
    with pytest.raises(DataError, match="one object on each line"):
        text_of(RawDocument("f.json", 1, line.encode(), True, True), "text", "strict")
