"""Bytes that should be UTF-8: the mark that some programs begin files with, and what is no UTF-8."""

from __future__ import annotations

import codecs
from typing import Any, BinaryIO

PIECE = 1 << 20


def skip_mark(stream: Any) -> None:
    """Leave out a byte order mark at the beginning, which is no part of the text. stream: one that
    can be peeked into.
    """
    if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))


def decodes(stream: BinaryIO) -> bool:
    """Whether all of a stream is UTF-8. Reads it to its end, a piece at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while piece := stream.read(PIECE):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def replaced(data: bytes) -> int:
    """Characters U+FFFD that decoding puts in the place of bytes; those that stand in the data are none."""
    return data.decode("utf-8", errors="replace").count("\ufffd") - data.count("\ufffd".encode())


def seems(data: bytes) -> str:
    """What a file that begins with these bytes seems to be, with what helps; empty where nothing shows."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "; it begins as UTF-16 does: iconv -f utf-16 -t utf-8 makes UTF-8 of it"
    return ""
