"""What bytes are that are no UTF-8: archives and packed files by their beginning, other encodings by their NULs."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

HEAD = 512
"""Number of first bytes that tell the kind of a file."""
SAMPLE = 1 << 12
"""Number of bytes that tell an encoding."""


class Kind(NamedTuple):
    """A kind of file that is no text.

    place   the offset of its signature
    begins  the signature
    what    its name
    way     what to do with it
    """

    place: int
    begins: bytes
    what: str
    way: str


KINDS = (
    Kind(257, b"ustar\x00", "a tar archive", "tar -xf unpacks it"),
    Kind(257, b"ustar  \x00", "a tar archive", "tar -xf unpacks it"),
    Kind(0, b"PK\x03\x04", "a zip archive", "unzip unpacks it"),
    Kind(0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "7z x unpacks it"),
    Kind(0, b"Rar!\x1a\x07", "a RAR archive", "unrar x unpacks it"),
    *(Kind(0, b"BZh%d1AY&SY" % level, "packed by bzip2", "bunzip2 unpacks it") for level in range(1, 10)),
    Kind(0, b"\xfd7zXZ\x00", "packed by xz", "xz -d unpacks it"),
    Kind(
        0,
        b"\x1f\x8b",
        "packed by gzip",
        "gunzip unpacks it, and tar -xzf a .tgz; a file is unpacked once as it is read if its name ends in .gz",
    ),
    Kind(
        0,
        b"\x28\xb5\x2f\xfd",
        "packed by zstd",
        "unzstd unpacks it; a file is unpacked once as it is read if its name ends in .zst",
    ),
    *(Kind(0, b"%%PDF-%d." % version, "a PDF", "pdftotext writes its text") for version in (1, 2)),
    Kind(
        0,
        b"PAR1\x15",
        "a Parquet file",
        "pandas.read_parquet(FILE).to_json(OUTPUT, orient='records', lines=True) makes JSON lines of it",
    ),
    Kind(
        0, b"ARROW1\x00\x00", "an Arrow file", "datasets.Dataset.from_file(FILE).to_json(OUTPUT) makes JSON lines of it"
    ),
    Kind(0, b"SQLite format 3\x00", "an SQLite database", "sqlite3 FILE writes what queries find"),
)
"""Signatures of files that are found where text is expected. None of them begins a text."""
MARKS: Mapping[bytes, str] = MappingProxyType(
    {
        codecs.BOM_UTF32_LE: "utf-32",
        codecs.BOM_UTF32_BE: "utf-32",
        codecs.BOM_UTF16_LE: "utf-16",
        codecs.BOM_UTF16_BE: "utf-16",
    }
)
"""Byte order mark -> encoding for iconv. The mark of UTF-32 begins with that of UTF-16, so it is looked for first."""
NULS: Mapping[tuple[int, ...], str] = MappingProxyType(
    {(1, 3): "utf-16le", (0, 2): "utf-16be", (1, 2, 3): "utf-32le", (0, 1, 2): "utf-32be"}
)
"""Which of four bytes are often NUL, while the others never are -> encoding for iconv."""
OFTEN, NEVER = 0.2, 0.02


def kind_of(head: bytes) -> Kind | None:
    """The kind of a file with these first bytes, `HEAD` or more; None if it may be text."""
    return next((kind for kind in KINDS if head.startswith(kind.begins, kind.place)), None)


def told_of_kind(head: bytes, name: str, *, unpacked: bool = False) -> str | None:
    """A sentence on a file that is no text, by its first bytes; None if it may be text.

    unpacked: whether the bytes are what its packing holds.
    """
    kind = kind_of(head)
    if kind is None:
        return None
    return f"{name}{', unpacked,' if unpacked else ''} is {kind.what}, and no text: {kind.way}"


def guess_encoding(data: bytes) -> str:
    """A hint for data that are no UTF-8: UTF-16 or UTF-32, and how to convert it; else empty."""
    marked = next((name for mark, name in MARKS.items() if data.startswith(mark)), None)
    if marked:
        return f"; it begins as {marked.upper()} does: iconv -f {marked} -t utf-8 makes UTF-8 of it"
    parts = [data[start:SAMPLE:4] for start in range(4)]
    shares = [part.count(0) / max(len(part), 1) for part in parts]
    often = tuple(place for place, share in enumerate(shares) if share > OFTEN)
    if often in NULS and all(share < NEVER for place, share in enumerate(shares) if place not in often):
        return f"; it has NULs as {NULS[often][:6].upper()} does: iconv -f {NULS[often]} -t utf-8 makes UTF-8 of it"
    return ""


def fault_of_text(data: bytes) -> str | None:
    """What is wrong with data that should be text in UTF-8: 'byte 3 is ...', and a hint; None if nothing is."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} is no UTF-8 ({error.reason}){guess_encoding(data)}"
    place = data.find(0)
    return None if place < 0 else f"byte {place} is NUL, which no text holds{guess_encoding(data)}"
