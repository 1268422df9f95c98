"""Which files of a folder are read, and what is said of the others."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from megazero.data.conversations import ConversationEncoder, read_conversations
from megazero.data.documents import RawDocument, text_of
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.input_files import ReaderOptions, find_files, is_json
from megazero.data.preprocess import PreprocessJob, preprocess, texts
from megazero.data.progress import silent
from megazero.data.tokenizer import ByteTokenizer
from megazero.evaluation.documents import text_documents
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


def _tar() -> bytes:
    with tarfile.open(fileobj=(made := io.BytesIO()), mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return made.getvalue()


def _zip() -> bytes:
    with zipfile.ZipFile(made := io.BytesIO(), "w") as archive:
        archive.writestr("a.txt", "text")
    return made.getvalue()


def _zstd() -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(b"text"))


PACKED: Mapping[str, tuple[Callable[[], bytes], str]] = MappingProxyType(
    {
        "a.tar": (_tar, " is a tar archive, and no text: tar -xf unpacks it"),
        "a.tar.gz": (lambda: gzip.compress(_tar()), ", unpacked, is a tar archive, and no text: tar -xf unpacks it"),
        "a.tgz": (
            lambda: gzip.compress(_tar()),
            " is packed by gzip, and no text: gunzip unpacks it, and tar -xzf a .tgz",
        ),
        "a.gzip": (
            lambda: gzip.compress(b"text"),
            " is packed by gzip, and no text: .* once as it is read if its name ends in .gz",
        ),
        "a.txt.gz": (lambda: gzip.compress(gzip.compress(b"text")), ", unpacked, is packed by gzip"),
        "a.txt.zstd": (_zstd, " is packed by zstd, and no text: .* once as it is read if its name ends in .zst"),
        "a.zip": (_zip, " is a zip archive, and no text: unzip unpacks it"),
        "a.txt.bz2": (lambda: bz2.compress(b"text"), " is packed by bzip2, and no text: bunzip2 unpacks it"),
        "a.jsonl.xz": (lambda: lzma.compress(b"text"), " is packed by xz, and no text: xz -d unpacks it"),
        "a.pdf": (lambda: b"%PDF-1.4\n1 0 obj\n", " is a PDF, and no text: pdftotext writes its text"),
        "a.parquet": (
            lambda: b"PAR1\x15\x04text",
            r" is a Parquet file, and no text: pandas.read_parquet\(FILE\).to_json",
        ),
    }
)


def _read_by_all(path: Path, reader: ReaderOptions) -> list[str]:
    """The messages of every way to read text."""
    ways: tuple[Callable[[], object], ...] = (
        lambda: preprocess([path], path.parent / "out", PreprocessJob("byte", None, reader), workers=1, report=silent),
        lambda: list(texts([path], reader, silent, "reading")),
        lambda: list(text_documents([path], reader, ByteTokenizer())),
        lambda: list(read_conversations([path], ConversationEncoder(ByteTokenizer(), 256, 257), silent)),
    )
    told = []
    for way in ways:
        with pytest.raises(DataError) as said:
            way()
        told.append(str(said.value))
    return told


@pytest.mark.parametrize("name", PACKED)
def test_archives_and_packed_files_say_what_they_are(tmp_path: Path, name: str) -> None:
    """Also where their bytes happen to be UTF-8, and where wrong bytes are read on."""
    make, message = PACKED[name]
    (tmp_path / name).write_bytes(make())
    for reader in (ReaderOptions(), ReaderOptions(encoding_errors="replace"), ReaderOptions(format="jsonl")):
        for told in _read_by_all(tmp_path / name, reader):
            assert re.match(re.escape(str(tmp_path / name)) + message, told), told
    (tmp_path / "b.txt").write_text("text")
    said: list[str] = []
    job = PreprocessJob("byte", None, ReaderOptions(skip_undecodable=True))
    inputs = [tmp_path / name, tmp_path / "b.txt"]
    assert preprocess(inputs, tmp_path / "out", job, workers=1, report=said.append).documents == 1
    assert f"--skip-undecodable: 1 document left out, the first of them {tmp_path / name}" in said


@pytest.mark.parametrize("begins", ["BZh9 is a name", "PAR1 and PAR2", "PK and more", "%PDF is a format", "ustar" * 60])
def test_text_that_only_begins_alike_is_text(tmp_path: Path, begins: str) -> None:
    (tmp_path / "a.txt").write_text(begins)
    assert list(texts([tmp_path / "a.txt"], ReaderOptions(), silent, "reading")) == [begins]


UNMARKED = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", *UNMARKED])
@pytest.mark.parametrize("text", ['{"prompt": "grün", "completion": "text", "text": "text"}\n', '{"text": "plain"}\n'])
def test_other_encodings_name_the_command(tmp_path: Path, encoding: str, text: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode(encoding))
    for reader in (ReaderOptions(), ReaderOptions(format="text")):
        for told in _read_by_all(tmp_path / "a.jsonl", reader):
            assert (
                f"iconv -f {encoding.replace('-le', 'le').replace('-be', 'be')} -t utf-8" in told
                and "replace" not in told
            )


def test_nul_is_no_text_unless_wrong_bytes_are_read_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\0text, and more of it")
    for told in _read_by_all(tmp_path / "a.txt", ReaderOptions())[:3]:
        assert "a.txt, line 1: byte 4 of the document is NUL, which no text holds; --encoding-errors replace" in told
    prepare, train, evaluate, _ = _read_by_all(tmp_path / "a.txt", ReaderOptions())
    assert all(told.endswith("--skip-undecodable leaves such documents out") for told in (prepare, train))
    assert evaluate.endswith("--encoding-errors replace reads on"), "it has no --skip-undecodable"
    reader = ReaderOptions(encoding_errors="replace")
    assert list(texts([tmp_path / "a.txt"], reader, silent, "reading")) == ["good\0text, and more of it"]
    (tmp_path / "b.jsonl").write_text('{"text": "a\\u0000b"}\n')
    assert list(texts([tmp_path / "b.jsonl"], ReaderOptions(), silent, "reading")) == ["a\0b"]
    reader = ReaderOptions(skip_undecodable=True)
    assert list(texts([tmp_path / "a.txt", tmp_path / "b.jsonl"], reader, silent, "reading")) == ["a\0b"]


def test_byte_order_marks_before_lines_of_json_are_no_text(tmp_path: Path) -> None:
    """As several files have them that became one."""
    mark = b"\xef\xbb\xbf"
    line = b'{"text": "one"}\n'
    (tmp_path / "a.jsonl").write_bytes(mark + mark + line + line + mark + line)
    assert list(texts([tmp_path / "a.jsonl"], ReaderOptions(), silent, "reading")) == ["one"] * 3
