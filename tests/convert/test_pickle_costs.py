"""Small pickles that would take all memory or all time: refused at once, with one error."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable

import pytest

from megazero.convert.files.torch_globals import torch_table
from megazero.convert.files.unpickle import unpickle
from megazero.convert.source import ConversionError

PROTOCOL = b"\x80\x02"
MEGABYTE = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)


def shared(opening: bytes, closing: bytes, levels: int) -> bytes:
    """A thousand times the same, in a thousand times the same, ...: it lies at the stack's top and in the memo."""
    made = b"(" + b"N" * 1000 + closing + b"q\0"
    for level in range(levels):
        made += b"0" + opening + bytes([ord("h"), level]) * 1000 + closing + bytes([ord("q"), level + 1])
    return made


def called(name: bytes, argument: bytes, times: int = 20_000) -> bytes:
    """A list of what the function makes of one and the same argument."""
    return PROTOCOL + b"c" + name + b"\nq\xf00(" + argument + b"tq\xf10(" + b"h\xf0h\xf1R" * times + b"l."


BOMBS: dict[str, Callable[[], tuple[bytes, str]]] = {
    "a key of shared tuples": lambda: (PROTOCOL + b"}" + shared(b"(", b"t", 4) + b"Ns.", "more than 64 parts"),
    "a wide key": lambda: (PROTOCOL + b"}(" + b"N" * 1000 + b"tNs.", "more than 64 parts"),
    "an error that shows shared lists": lambda: (
        PROTOCOL + b"cnumpy\ndtype\n(" + shared(b"(", b"l", 8) + b"tR.",
        "only numbers",
    ),
    "lists of a list": lambda: (called(b"builtins\nlist", b"(" + b"N" * 500_000 + b"l"), "again and again"),
    "bytes of a text": lambda: (called(b"_codecs\nencode", MEGABYTE), "again and again"),
    "objects of many arguments": lambda: (called(b"argparse\nNamespace", b"N" * 500_000), "again and again"),
    "objects of one large state": lambda: (
        called(b"argparse\nNamespace", b"")[:-2]
        .replace(b"h\xf0h\xf1R", b"h\xf0h\xf1Rh\xf2b")
        .replace(
            b"tq\xf10(",
            b"tq\xf10}(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(50_000)) + b"uq\xf20(",
        )
        + b"l.",
        "again and again",
    ),
}


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("name", list(BOMBS))
def test_small_files_stay_small(name: str) -> None:
    data, said = BOMBS[name]()
    with pytest.raises(ConversionError, match=said):
        unpickle(data, "file.pt", torch_table(), ["argparse.*"])


def test_data_that_is_there_once_may_be_large() -> None:
    data = PROTOCOL + b"c_codecs\nencode\n(" + MEGABYTE * 8 + b"tR."
    with pytest.raises(ConversionError, match="takes"):
        unpickle(data, "file.pt", torch_table())
    data = PROTOCOL + b"(" + (b"c_codecs\nencode\n(" + MEGABYTE + b"tR") * 8 + b"l."
    assert [len(found) for found in unpickle(data, "file.pt", torch_table())] == [1 << 20] * 8


def test_an_entry_of_the_memo_takes_no_room_for_those_below() -> None:
    """Python's unpickler in C makes an array as long as the number is large."""
    tracemalloc.start()
    try:
        assert unpickle(PROTOCOL + b"Nr" + struct.pack("<I", 1 << 30) + b".", "file.pt", torch_table()) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_numbers_that_end_too_early() -> None:
    for number in (b"J\1\2", b"M\1", b"G\0\0\0", b"X\3\0", b"\x8b\3", b"\x8d\0\0", b"\x96\1\2", b"\x95\1"):
        for protocol in (b"\x80\2", b"\x80\5"):
            with pytest.raises(ConversionError, match=r"broken|announces|does not"):
                unpickle(protocol + number, "file.pt", torch_table())


@pytest.mark.slow
def test_random_faults_end_in_one_kind_of_error() -> None:
    """Of a pickle as torch writes them, with bytes changed and cut off."""
    whole = PROTOCOL + b"}(X\1\0\0\0acargparse\nNamespace\n)R}X\1\0\0\0bG?\xf0\0\0\0\0\0\0sbK\5M\1\1J\1\1\1\1u."
    draw = random.Random(5)
    for _ in range(3000):
        data = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
        for _ in range(draw.randrange(3)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            unpickle(bytes(data), "file.pt", torch_table(), ["argparse.*"])
        except ConversionError as error:
            assert "file.pt" in str(error)
