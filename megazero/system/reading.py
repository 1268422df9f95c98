"""Bounded readers of untrusted files.

A file may be truncated, or of another kind than its name says. It may contain huge sizes, an endless line or deep
nesting. Readers check such values against the table `BOUNDS` before they allocate memory or recurse. Each bound is far
above that of any real file. This file reads text and JSON; readers of other formats (YAML, pickles, zstd) use the same
table.
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

from megazero.system.file_kinds import HEAD, fault_of_text, told_of_kind

PIPE_BLOCK = 1 << 20
"""Bytes that are asked for at once of what does not say its size."""


@dataclass(frozen=True)
class Bounds:
    """The largest sizes and numbers that are accepted in a file or in the configuration."""

    word: int = 1 << 12
    "Bytes of a file with one word: `latest`, a tracker, the token of a run."
    settings: int = 1 << 18
    "Bytes of a YAML file of settings."
    settings_parts: int = 20_000
    "Lines, commas, colons and brackets of a YAML file, and values in it with all aliases expanded."
    description: int = 1 << 22
    "Bytes of a JSON file that describes a model or a run: config.json, adapter_config.json, a DeepSpeed configuration."
    index: int = 1 << 26
    "Bytes of an index of tensors, a chat template, a file of prompts."
    tokenizer: int = 1 << 28
    "Bytes of a tokenizer's file."
    header: int = 100_000_000
    "Bytes of a safetensors header; the safetensors library has the same bound."
    manifest: int = 1 << 30
    "Bytes of a checkpoint's manifest, and of the pickle inside a torch file."
    document: int = 1 << 27
    """Bytes of a line of jsonl, or of a line that is a document. A text file that is one document is read in pieces
    and may be longer."""
    values: int = 1 << 30
    "Bytes of memory for the values of one JSON text, as estimated before it is parsed (`json_memory_bound`)."
    manifest_values: int = 1 << 34
    "The same for a checkpoint's manifest and for the header of one of its files."
    depth: int = 100
    "Nesting levels of lists and objects in JSON and YAML."
    digits: int = 300
    "Digits of a whole number in JSON; float64 can represent numbers of this size."
    layers: int = 1 << 12
    "Blocks of a model."
    heads: int = 1 << 16
    "Attention heads, their width, the rank of an adapter."
    width: int = 1 << 24
    "Hidden size and feed-forward width."
    vocabulary: int = 1 << 24
    "Tokens of a model or tokenizer. All ids are less than this."
    positions: int = 1 << 28
    "Tokens of a sample, rows of a position table."
    ranks: int = 1 << 20
    "Ranks along one axis."
    batch: int = 1 << 24
    "Samples of one step."
    threads: int = 1 << 10
    "Threads that prepare batches."
    epochs: int = 10**9
    "Epochs of a run."
    minutes: int = 10**8
    "Minutes of a timeout; they must fit into 64-bit nanoseconds."
    count: int = 1 << 53
    "Any other whole number. JSON and float64 represent all numbers up to it exactly."
    dimensions: int = 32
    "Axes of a tensor."
    elements: int = 1 << 56
    "Elements of a tensor according to its shape."
    repeated: int = 1 << 24
    "Elements of a tensor that has more of them than its storage, by strides of 0."
    block: int = 1 << 30
    "Bytes of a block of a checkpoint's file, which has one hash."
    key_parts: int = 64
    "Parts of a key in a pickle. Nested shared tuples can have more parts than can be hashed."
    copies: int = 16
    "Bytes that calls in a pickle may copy, as a multiple of its length."
    pipe_seconds: int = 1
    "Seconds to wait for a writer to open a pipe. A writer that has opened it may take longer to write."
    adapters: int = 8
    "Checkpoints of adapters that refer to each other in a chain."


BOUNDS = Bounds()


class Unreadable(ValueError):
    """A file is missing, is no text or no JSON, or exceeds `BOUNDS`. The message names the file."""


@contextmanager
def raised_as(error_type: type[Exception]) -> Iterator[None]:
    """Turn an Unreadable inside the block into an error of this type."""
    try:
        yield
    except Unreadable as error:
        raise error_type(str(error)) from error


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises Unreadable for others (a pipe, a device): reading them may never end."""
    file = _opened(path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Unreadable(f"{path} is a pipe or a device, and no file")
    return file


def read_bytes(path: Path, most: int, *, piped: bool = False) -> bytes:
    """The content of a file of at most `most` bytes. Raises Unreadable.

    piped: also accept a pipe. This is for files that a user names on the command line: `--config <(...)`.
    """
    with _opened(path) if piped else open_file(path) as file:
        there = os.fstat(file.fileno())
        try:
            # read() allocates as much as it is asked for, so it is asked for the file's size at most. A pipe and files
            # of /proc have no size, and neither has an empty file: they are read in blocks.
            sized = stat.S_ISREG(there.st_mode) and there.st_size > 0
            data = file.read(min(most, there.st_size) + 1) if sized else _from_pipe(file, path, most + 1)
        except OSError as error:
            raise _closed(path, error) from error
    if len(data) > most:
        raise Unreadable(f"{path} has more than {most:,} bytes, which is more than such a file holds")
    return data


def _opened(path: Path) -> BinaryIO:
    """Open a file without waiting, also a pipe without a writer."""
    if fault := fault_of_path(str(path)):
        raise Unreadable(f"{shown(str(path))} {fault}")
    try:
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        raise _closed(path, error) from error


def _closed(path: Path, error: OSError) -> Unreadable:
    missing = isinstance(error, FileNotFoundError)
    return Unreadable(f"{path} is missing" if missing else f"{path} cannot be read: {error.strerror or error}")


def _from_pipe(file: BinaryIO, path: Path, most: int) -> bytes:
    """Read a pipe to its end, at most `most` bytes. It waits `BOUNDS.pipe_seconds` for a writer to open the pipe."""
    asked = select.poll()
    asked.register(file.fileno(), select.POLLIN)
    heard = asked.poll(1000 * BOUNDS.pipe_seconds)
    try:
        first = os.read(file.fileno(), 1)
    except BlockingIOError:  # there is a writer that has not written yet
        first = b""
    else:
        if not first and not heard:
            raise Unreadable(f"{path} is a pipe or a device, and nobody writes into it")
    os.set_blocking(file.fileno(), True)
    blocks, left = [first], most - len(first)
    while left and (block := file.read(min(left, PIPE_BLOCK))):
        blocks.append(block)
        left -= len(block)
    return b"".join(blocks)


def read_text(path: Path, most: int, *, piped: bool = False) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. Arguments as in `read_bytes`. Raises Unreadable."""
    data = read_bytes(path, most, piped=piped)
    if kind := told_of_kind(data[:HEAD], str(path)):
        raise Unreadable(kind)
    if fault := fault_of_text(data):
        raise Unreadable(f"{path} is no text: {fault}")
    return data.decode("utf-8-sig")


def read_json(path: Path, most: int, *, piped: bool = False) -> Any:
    """The value of a JSON file. Arguments as in `read_bytes`. Raises Unreadable."""
    return parse_json(read_text(path, most, piped=piped), str(path))


def read_object(path: Path, most: int) -> dict[str, Any]:
    """The object of a JSON file of at most `most` bytes. Raises Unreadable, also for other kinds of values."""
    found = read_json(path, most)
    if not isinstance(found, dict):
        raise Unreadable(f"{path} holds {json_type(found)}, not an object")
    return found


HELD: Mapping[str, int] = {"{": 240, "[": 90, ",": 90, ":": 120}
"""Sign of JSON -> upper bound of the memory in bytes that it stands for in Python: an object, a list, an item of a
list, an entry of an object.
"""


def json_memory_bound(text: str) -> int:
    """A rough upper bound of the memory in bytes for the values of a JSON text. It can be far larger than the text."""
    return sum(size * text.count(sign) for sign, size in HELD.items())


def parse_json(text: str, where: str, most: int = BOUNDS.values) -> Any:
    """The value of a JSON text of bounded depth and size. Raises Unreadable.

    where  beginning of error messages
    most   bound of `held(text)`, in bytes
    """
    if len(text) * max(HELD.values()) > most and json_memory_bound(text) > most:
        raise Unreadable(
            f"{where} holds so many values that they may take {json_memory_bound(text):,} bytes of memory, more than "
            f"{most:,}"
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
    """The repr of a value for a message; a long one is shortened."""
    return _SHORT.repr(value)


def fault_of_path(path: str) -> str | None:
    """Why no file can have this path; None if one can. Such a path comes from a file of settings, or from a program."""
    if "\0" in path:
        return "holds a NUL byte"
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # "\\ud800" in JSON or YAML
        return "holds half of a character"
    return None


def listed(names: Iterable[object]) -> str:
    """Names for a message: the first 20, each shortened to 80 characters."""
    return ", ".join(str(name)[:80] for name in islice(names, 20))


def path_error(path: str | Path, error: object) -> str:
    """`PATH: error`, or just the error if its text begins with the path already."""
    text = str(error)
    rest = text.removeprefix(str(Path(path).expanduser()))
    return text if rest != text and rest.startswith((" ", ":", "/")) else f"{path}: {text}"


def json_type(value: object) -> str:
    """The kind of a JSON value, in words for a message."""
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
