"""Damaged files made of whole ones, as strategies of hypothesis, which can therefore shrink a failing file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NUMBERS = (
    *(0, -1, 1, 2, 255, 65536, 2**31 - 1, 2**32, 2**53 + 1, 2**63 - 1),
    *(10**12, 10**17, 10**60, -(2**31), 0.5, 1e308),
)
ODD: tuple[Any, ...] = (
    *NUMBERS,
    *(None, True, False, "", "x", "1", "../x", "/etc/passwd"),
    *("\x00", "\ud800", "ü" * 300, "9" * 400, "none", "2024-13-45"),
    *([], {}, [0], [[]], {"": None}, [None, None], [1, "a", {}], float("inf"), float("-inf"), float("nan")),
)
"""Values that a reader may not expect."""
WORDS = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b'"', b"[" * 200, b"{" * 2, b"]", b"}", b",", b":"),
    *(b"- ", b"? ", b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"2024-13-45", b"0x" + b"f" * 50),
    *(b"9" * 5000, b"1e999", b"NaN", b"null", b"\\ud800", b"\xf0\x9f\x98\x80", b"\xff" * 8, b"\x7f" + b"\xff" * 7),
    *(b"(", b"t", b"R", b"b", b"c__main__\nx\n", b"q\x00", b"h\x00", b"\x8a\x08" + b"\x7f" * 8, b"]", b"}", b"u."),
)
_DIGITS = re.compile(rb"-?\d+")


@st.composite
def changed_bytes(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds with one to four places overwritten, cut out, doubled or filled with something else."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("flip", "word", "over", "out", "twice", "end", "number")))
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        elif kind in ("word", "over"):
            word = draw(st.sampled_from(WORDS))
            data = data[:at] + word + data[at + (len(word) if kind == "over" else 0) :]
        elif kind == "number":
            found = list(_DIGITS.finditer(data))
            if found:
                match = draw(st.sampled_from(found))
                data = data[: match.start()] + str(draw(st.sampled_from(NUMBERS))).encode() + data[match.end() :]
        else:
            stop = min(len(data), at + draw(st.integers(1, 40)))
            data = {"out": data[:at] + data[stop:], "twice": data[:stop] + data[at:], "end": data[:at]}.get(kind, data)
    return data


@st.composite
def changed_values(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, which are JSON, with one to three of its values replaced, left out or moved into a list."""
    value = json.loads(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 3))):
        value = _elsewhere(draw, value)
    return json.dumps(value).encode("utf-8", errors="surrogatepass")


def _elsewhere(draw: st.DrawFn, value: Any) -> Any:
    """A copy with one change. The place is drawn level by level, so that rare kinds of entries are changed as well."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or draw(st.integers(0, 5)) == 0:
        kind = draw(st.sampled_from(("odd", "odd", "odd", "deep", "listed")))
        return draw(st.sampled_from(ODD)) if kind == "odd" else _deep(value, 150) if kind == "deep" else [value]
    key = draw(st.sampled_from(keys))
    if draw(st.integers(0, 7)) == 0:
        return (
            {k: v for k, v in value.items() if k != key} if isinstance(value, dict) else value[:key] + value[key + 1 :]
        )
    inside = _elsewhere(draw, value[key])
    return {**value, key: inside} if isinstance(value, dict) else [*value[:key], inside, *value[key + 1 :]]


def _deep(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value
