"""Helpers for bytes that should be UTF-8: byte order marks and invalid bytes."""

from __future__ import annotations

import codecs
from typing import Any, BinaryIO

PIECE = 1 << 20


def skip_mark(stream: Any) -> None:
    """Skip a byte order mark at the beginning of a stream, which must have `peek`."""
    if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))


def is_utf8(stream: BinaryIO, *, nul: bool = True) -> bool:
    """Whether a whole stream is UTF-8. Reads it to its end in pieces. nul: whether it may hold NULs."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while piece := stream.read(PIECE):
            if not nul and 0 in piece:
                return False
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def count_replaced(data: bytes) -> int:
    """Number of characters U+FFFD by which decoding replaces bytes; those of the data itself do not count."""
    return data.decode("utf-8", errors="replace").count("\ufffd") - data.count("\ufffd".encode())
