"""Reads documents from jsonl and plain text files, also from .gz and .zst files and from folders, in bounded memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from megazero.data.indexed import DataError
from megazero.data.input_files import packing
from megazero.data.utf8 import skip_mark
from megazero.system.file_kinds import HEAD, fault_of_text, guess_encoding, told_of_kind
from megazero.system.reading import BOUNDS, Unreadable, json_type, listed, open_file, parse_json, raised_as

PIECE = 1 << 23
_ONE_A_LINE = (
    "; a file of JSON lines has one object on each line: `jq -c '.[]' FILE` makes lines of an array, `jq -c . FILE` of "
    "objects that span lines"
)
READING_ON = "; --encoding-errors replace reads on"
LEAVING_OUT = f"{READING_ON}, --skip-undecodable leaves such documents out"
"""What may be done about wrong bytes, but not about a whole file in another encoding."""
PACKED_PIECE = 1 << 10
"""Packed bytes that zstd unpacks at once. 4 bytes can stand for 128 kB, so the result has 32 MB at most."""


@dataclass(frozen=True, slots=True)
class RawDocument:
    """The bytes of a document, or of a piece of a long one.

    path     name of the file
    line     number of its line, from 1
    data     undecoded bytes
    is_json  whether it is a line of jsonl
    last     whether it ends the document
    """

    path: str
    line: int
    data: bytes
    is_json: bool
    last: bool


@dataclass
class OpenDocuments:
    """An open file: `stream` reads its unpacked bytes; `raw.tell()` is the position in the packed file."""

    stream: BinaryIO
    raw: BinaryIO


@contextmanager
def open_documents(path: Path) -> Iterator[OpenDocuments]:
    with raised_as(DataError):
        file = open_file(path)
    with file as raw:
        if packing(path) == ".gz":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield OpenDocuments(cast(BinaryIO, unpacked), raw)
        elif packing(path) == ".zst":
            yield OpenDocuments(io.BufferedReader(_Zstd(raw, path), 1 << 20), raw)
        else:
            yield OpenDocuments(raw, raw)


class _Zstd(io.RawIOBase):
    """Unpacks all frames of a zstd file. It raises EOFError for a truncated frame; the library's reader does not."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(f"{path} needs the package zstandard: pip install zstandard") from error
        self._raw, self._path, self._start = raw, path, zstandard.ZstdDecompressor().decompressobj
        self._failure = zstandard.ZstdError
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(1 << 16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the last frame is cut off")
                return 0
            self._frame = self._frame or self._start()
            piece, self._packed = self._packed[:PACKED_PIECE], self._packed[PACKED_PIECE:]
            try:
                self._ready = self._frame.decompress(piece)
            except self._failure as error:
                raise OSError(str(error)) from error
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data + self._packed, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def documents(reading: OpenDocuments, path: Path, as_json: bool, document: str) -> Iterator[RawDocument]:
    """The documents of one file in order. jsonl: each line, without blank ones. Text: the file, or each line.

    document: "file" or "line", for text. Lines end with \\n or \\r\\n. Raises DataError naming the file where it cannot
    be read, and where it is no text but an archive or a packed file.
    """
    name = str(path)
    try:
        if kind := no_text(reading, path):
            raise DataError(kind)
        skip_mark(reading.stream)
        if as_json:
            for number, line in _lines(reading.stream, name):
                if line.strip():
                    yield RawDocument(name, number, line, True, True)
        elif document == "line":
            for number, line in _lines(reading.stream, name):
                yield RawDocument(name, number, line.removesuffix(b"\n").removesuffix(b"\r"), False, True)
        else:
            yield from _pieces(reading.stream, name)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read to its end: {error}") from error


def no_text(reading: OpenDocuments, path: Path) -> str | None:
    """A sentence on an open file that is an archive or packed once more; None if it may be text. Reads nothing on."""
    head = cast(Any, reading.stream).peek(HEAD)
    return told_of_kind(head[:HEAD], str(path), unpacked=bool(packing(path)))


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line). Raises DataError for a line that is longer than `BOUNDS.document`."""
    for number in count(1):
        line = stream.readline(BOUNDS.document + 1)
        if len(line) > BOUNDS.document:
            raise DataError(
                f"{name}, line {number} is longer than {BOUNDS.document:,} bytes, the most that is read as one document"
            )
        if not line:
            return
        yield number, line


def _pieces(stream: BinaryIO, name: str) -> Iterator[RawDocument]:
    """A file as one document, in pieces of bounded size that end behind a line, a space or at least a character."""
    rest, line = b"", 1
    while block := stream.read(PIECE):
        rest += block
        if len(rest) > PIECE:
            cut = max(rest.rfind(b"\n"), rest.rfind(b" ")) + 1 or _character_start(rest)
            yield RawDocument(name, line, rest[:cut], False, False)
            line += rest.count(b"\n", 0, cut)
            rest = rest[cut:]
    yield RawDocument(name, line, rest, False, True)


def _character_start(data: bytes) -> int:
    """The offset of the last character of UTF-8 data."""
    place = len(data) - 1
    while place > 0 and data[place] & 0xC0 == 0x80:
        place -= 1
    return place


def json_record(text: str, where: str) -> dict[str, Any]:
    """The object in a line of JSON lines. Raises DataError, which says what is in the file instead.

    A byte order mark before it is dropped: files with marks that became one file have them at lines of their own.
    """
    text = text.lstrip("\ufeff")
    opening = text.lstrip()[:1]
    try:
        record = parse_json(text, where)
    except Unreadable as error:
        spread = opening in ("[", "{") and text.rstrip()[-1:] not in ("]", "}")
        raise DataError(f"{error}{_ONE_A_LINE * spread}") from error
    if isinstance(record, dict):
        return record
    raise DataError(f"{where} is {json_type(record)}, and no object{_ONE_A_LINE * (opening == '[')}")


def text_of(raw: RawDocument, json_key: str, errors: str, advice: str = LEAVING_OUT) -> str:
    """The text of a document. errors: "strict" or "replace", for bytes that are no UTF-8. advice: the flags that a
    command has for them.

    A lone surrogate in JSON becomes U+FFFD. Raises DataError naming file and line.
    """
    where = f"{raw.path}, line {raw.line}"
    if errors == "strict" and (fault := fault_of_text(raw.data)):
        ways = "" if guess_encoding(raw.data) else advice
        raise DataError(f"{where}: {fault.replace(' is', ' of the document is', 1)}{ways}")
    text = raw.data.decode("utf-8", errors=errors)
    if not raw.is_json:
        return text
    record = json_record(text, where)
    if json_key not in record:
        raise DataError(f"{where} has no text under --json-key {json_key!r}; it holds {listed(record) or 'no key'}")
    if not isinstance(record[json_key], str):
        raise DataError(f"{where} holds {json_type(record[json_key])} under --json-key {json_key!r}, and no text")
    found: str = record[json_key]
    if any("\ud800" <= symbol <= "\udfff" for symbol in found):
        return found.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")
    return found
