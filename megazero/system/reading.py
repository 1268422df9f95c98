"""Files that others wrote, read within bounds.

A file may be cut off, may be of another kind than its name says, and may claim anything: numbers that no memory holds,
a line without end, brackets inside brackets. A reader looks at a claim before it acts upon it. What is too much stands
in one table, `BOUNDS`; each bound is far above what any real file holds. Here are the readers of words and of JSON;
what else has a form of its own (YAML, pickles, zstd) asks the same table.
"""

from __future__ import annotations

import json
import os
import reprlib
import select
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Bounds:
    """The most that a file may hold or claim."""

    word: int = 1 << 12
    "Bytes of a file that holds a word: `latest`, a tracker, the token of a run."
    settings: int = 1 << 18
    "Bytes of a YAML file of settings."
    settings_parts: int = 20_000
    "Lines, commas, colons and brackets of such a file, and values in it once its aliases are written out."
    description: int = 1 << 22
    "Bytes of a JSON file that describes a model or a run: config.json, adapter_config.json, a DeepSpeed configuration."
    index: int = 1 << 26
    "Bytes of an index of tensors, a chat template, a file of prompts."
    tokenizer: int = 1 << 28
    "Bytes of a file that a tokenizer is read from."
    header: int = 100_000_000
    "Bytes of a safetensors header; the safetensors library has the same bound."
    manifest: int = 1 << 30
    "Bytes of a checkpoint's manifest, and of the pickle inside a torch file."
    document: int = 1 << 27
    """Bytes of a line of jsonl, or of a line that is a document. A text file that is one document is read in pieces
    and may be longer."""
    values: int = 1 << 30
    """Bytes of memory for the values of one JSON text, as its brackets, commas and colons say before it is parsed
    (`held`)."""
    manifest_values: int = 1 << 34
    "Such bytes for a checkpoint's manifest and for the header of one of its files."
    depth: int = 100
    "Levels of lists and objects inside each other, in JSON and YAML."
    digits: int = 300
    "Digits of a whole number in JSON; float64 holds as large ones."
    layers: int = 1 << 12
    "Blocks of a model."
    heads: int = 1 << 16
    "Attention heads, their width, the rank of an adapter."
    width: int = 1 << 24
    "Hidden size and feed-forward width."
    vocabulary: int = 1 << 24
    "Tokens of a model or tokenizer; an id is below it."
    positions: int = 1 << 28
    "Tokens of a sample, rows of a position table."
    ranks: int = 1 << 20
    "Ranks along one axis."
    batch: int = 1 << 24
    "Samples of one step."
    threads: int = 1 << 10
    "Threads that prepare batches."
    epochs: int = 10**9
    "Times that data are read."
    minutes: int = 10**8
    "Minutes that somebody waits; a clock that counts nanoseconds in 64 bits holds half as many more."
    count: int = 1 << 53
    "Any other whole number; JSON and float64 hold all up to it."
    dimensions: int = 32
    "Axes of a tensor."
    elements: int = 1 << 56
    "Elements of a tensor, as far as its shape says."
    repeated: int = 1 << 24
    "Elements of a tensor that are more than its storage has, which strides of 0 make of little."
    block: int = 1 << 30
    "Bytes of a checkpoint's file that one hash is of."
    key_parts: int = 64
    "Parts of a key in a pickle; a tuple of shared tuples has more of them than could ever be hashed."
    copies: int = 16
    "Times that the calls in a pickle may be given its whole length: a file has its data once."
    pipe_seconds: int = 1
    "Seconds within which somebody must have opened a pipe to write into it; who has may take longer."
    adapters: int = 8
    "Checkpoints of adapters on top of each other."


BOUNDS = Bounds()


class Unreadable(ValueError):
    """A file is missing, no text, no JSON, or more than `BOUNDS` allows. The message names the file."""


@contextmanager
def raised_as(error_type: type[Exception]) -> Iterator[None]:
    """What is unreadable inside is a reader's own kind of error."""
    try:
        yield
    except Unreadable as error:
        raise error_type(str(error)) from error


def open_file(path: Path) -> BinaryIO:
    """A file, open to be read. What is none (a pipe, a device) is refused: a read of it may never end.

    Raises Unreadable.
    """
    file = _opened(path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Unreadable(f"{path} is a pipe or a device, and no file")
    return file


def read_bytes(path: Path, most: int, *, piped: bool = False) -> bytes:
    """What is in a file of at most so many bytes. Raises Unreadable.

    piped: a pipe will do as well, as for what a user names on the command line, who may write `--config <(...)`.
    """
    with _opened(path) if piped else open_file(path) as file:
        there = os.fstat(file.fileno())
        try:
            # A buffer is made for all that is asked for, so no more is than there is; a pipe has no size, nor have the
            # files of /proc.
            sized = stat.S_ISREG(there.st_mode) and there.st_size > 0
            data = file.read(min(most, there.st_size) + 1) if sized else _from_pipe(file, path, most + 1)
        except OSError as error:
            raise _closed(path, error) from error
    if len(data) > most:
        raise Unreadable(f"{path} has more than {most:,} bytes, which is more than such a file holds")
    return data


def _opened(path: Path) -> BinaryIO:
    """Open at once, also where it is a pipe into which nobody writes."""
    try:
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        raise _closed(path, error) from error


def _closed(path: Path, error: OSError) -> Unreadable:
    missing = isinstance(error, FileNotFoundError)
    return Unreadable(f"{path} is missing" if missing else f"{path} cannot be read: {error.strerror or error}")


def _from_pipe(file: BinaryIO, path: Path, most: int) -> bytes:
    """All that its writer writes, however long that takes; nobody is waited for to become its writer."""
    asked = select.poll()
    asked.register(file.fileno(), select.POLLIN)
    heard = asked.poll(1000 * BOUNDS.pipe_seconds)
    try:
        first = os.read(file.fileno(), 1)
    except BlockingIOError:  # there is one, who has not written yet
        first = b""
    else:
        if not first and not heard:
            raise Unreadable(f"{path} is a pipe or a device, and nobody writes into it")
    os.set_blocking(file.fileno(), True)
    return first + file.read(most - len(first))


def read_text(path: Path, most: int, *, piped: bool = False) -> str:
    """UTF-8, with or without a byte order mark. Raises Unreadable. piped: as of `read_bytes`."""
    data = read_bytes(path, most, piped=piped)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is no text: byte {error.start} is no UTF-8 ({error.reason})") from None


def read_json(path: Path, most: int, *, piped: bool = False) -> Any:
    """A file's JSON. Raises Unreadable. piped: as of `read_bytes`."""
    return parse_json(read_text(path, most, piped=piped), str(path))


def read_object(path: Path, most: int) -> dict[str, Any]:
    """A file's JSON, which is an object. Raises Unreadable."""
    found = read_json(path, most)
    if not isinstance(found, dict):
        raise Unreadable(f"{path} holds {kind(found)}, not an object")
    return found


HELD: Mapping[str, int] = {"{": 240, "[": 90, ",": 90, ":": 120}
"""Bytes of memory, at most, that each of these stands for in Python: an object of one entry, a list, a value of a list,
an entry of an object.
"""


def held(text: str) -> int:
    """What the values of a JSON text take in memory, about and from above: an empty object takes
    thirty times its text.
    """
    return sum(size * text.count(sign) for sign, size in HELD.items())


def parse_json(text: str, where: str, most: int = BOUNDS.values) -> Any:
    """JSON of bounded depth, with whole numbers of bounded length. where: what messages begin with. most: of `held`.

    Raises Unreadable.
    """
    if len(text) * max(HELD.values()) > most and held(text) > most:
        raise Unreadable(
            f"{where} holds so many values that they may take {held(text):,} bytes of memory, more than {most:,}"
        )
    try:
        found = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise Unreadable(f"{where} is nested more than {BOUNDS.depth} deep") from None
    except ValueError as error:
        raise Unreadable(f"{where} is no JSON: {error}") from None
    # Counting is much faster than walking, and hardly any text has so many brackets.
    if text.count("[") + text.count("{") > BOUNDS.depth and _is_deep(found):
        raise Unreadable(f"{where} is nested more than {BOUNDS.depth} deep")
    return found


def _whole(digits: str) -> int:
    if len(digits) > BOUNDS.digits:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(BOUNDS.depth):
        level = [
            part
            for held in level
            if isinstance(held, list | dict)
            for part in (held.values() if isinstance(held, dict) else held)
        ]
        level = [part for part in level if isinstance(part, list | dict)]
        if not level:
            return False
    return True


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = _SHORT.maxset = 6
_SHORT.maxlevel = 3


def shown(value: object) -> str:
    """A value in a message, cut short where it is long."""
    return _SHORT.repr(value)


def listed(names: Iterable[object]) -> str:
    """Names in a message: the first of many, the beginning of long ones."""
    return ", ".join(str(name)[:80] for name in islice(names, 20))


def about(path: str | Path, error: object) -> str:
    """`PATH: what is wrong there`, with the path once where what is wrong begins with it, or with what lies inside."""
    text = str(error)
    rest = text.removeprefix(str(Path(path).expanduser()))
    return text if rest != text and rest.startswith((" ", ":", "/")) else f"{path}: {text}"


def kind(value: object) -> str:
    """What JSON calls a value's kind."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
