"""Decode and check a manifest. Its sha256 proves that the bytes are as written; the checks find impossible values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megazero.checkpoint.blocks import DTYPES
from megazero.checkpoint.format import COLUMNS, MANIFEST, VERSION, Damaged, Manifest, StoredFile, StoredTensor, seal
from megazero.checkpoint.reshard import FlatRange
from megazero.system.names import is_plain_file_name
from megazero.system.reading import BOUNDS, parse_json, raised_as, shown


def decode(raw: bytes) -> Manifest:
    """Decode the bytes of a manifest file.

    Raises Damaged if the bytes differ from what was written or a value has an impossible type or range. Raises
    ValueError for another format version.
    """
    content = raw[: -len(seal(b""))]
    if raw != content + seal(content):
        raise Damaged(f"{MANIFEST} is not what was written: its sha256 does not fit its content")
    with raised_as(Damaged):
        document = parse_json(raw.decode(errors="replace"), MANIFEST, BOUNDS.manifest_values)
    if not isinstance(document, dict) or type(document.get("version")) is not int:
        raise Damaged(f"{MANIFEST} is not the manifest of a checkpoint: it has no version")
    if document["version"] != VERSION:
        raise ValueError(
            f"{MANIFEST} has format version {shown(document['version'])}; this program reads version {VERSION}"
        )
    missing = [key for key in ("tensors", "files", "run", "progress", "layout") if key not in document]
    if missing:
        raise Damaged(f"{MANIFEST} has no {', '.join(missing)}")
    files = [_file(number, record) for number, record in enumerate(_of(list, document["files"], "files"))]
    tensors = {
        name: _tensor(name, record, len(files)) for name, record in _of(dict, document["tensors"], "tensors").items()
    }
    run, progress, layout = (_of(dict, document[key], key) for key in ("run", "progress", "layout"))
    for key, value in progress.items():
        if not _PROGRESS.get(key, _anything)(value):
            raise Damaged(f"{MANIFEST}: progress.{key} is {shown(value)}")
    for key, value in layout.items():
        if not _is_count(value):
            raise Damaged(f"{MANIFEST}: layout.{key} is {shown(value)}")
    return Manifest(tensors, files, run, progress, layout)


def _of(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise Damaged(f"{MANIFEST}: {where} is {shown(value)}")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= BOUNDS.count


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # not finite is allowed: a run may have diverged


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _anything(value: Any) -> bool:
    return True


def _none_or(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _record(fields: Mapping[str, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    """A check for an object that has all of these fields, or is empty."""
    return lambda value: (
        isinstance(value, dict)
        and (not value or all(key in value and holds(value[key]) for key, holds in fields.items()))
    )


def _is_plans(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(plan, list) and plan and all(map(_is_count, plan)) for plan in value
    )


def _is_fp8(value: Any) -> bool:
    """For each layer and role: the history of largest absolute values, and a scale."""
    if not isinstance(value, dict) or not all(isinstance(roles, dict) for roles in value.values()):
        return False
    stored = [one for roles in value.values() for one in roles.values()]
    return all(
        isinstance(one, dict)
        and isinstance(one.get("amax"), list)
        and all(_is_number(each) for each in one["amax"])
        and _is_number(one.get("scale"))
        for one in stored
    )


_PROGRESS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        **dict.fromkeys(("iteration", "consumed_samples", "consumed_tokens"), _is_count),
        "optimizer_steps": _is_number,
        "loss_scale": _none_or(_record({"scale": _is_number, "good_steps": _is_count, "overflows": _is_count})),
        "fp8": _none_or(_is_fp8),
        **dict.fromkeys(("data_plans", "data_contents"), _none_or(_is_plans)),
        "probe": _none_or(_record({"loss": _is_number, "precision": _is_word, "seq_length": _is_count})),
    }
)
"""The known keys of a run's progress, and a check for the value of each."""


def _file(number: int, record: Any) -> StoredFile:
    held = _of(dict, record, f"files[{number}]")
    name, size, digest = (held.get(key) for key in ("name", "bytes", "header_sha256"))
    if not is_plain_file_name(name):
        raise Damaged(f"{MANIFEST} names {shown(name)}, which is no file of its folder")
    if not (isinstance(name, str) and _is_count(size) and isinstance(digest, str)):
        raise Damaged(f"{MANIFEST}: files[{number}] is {shown(record)}")
    return StoredFile(name, size, digest)


def _tensor(name: str, record: Any, files: int) -> StoredTensor:
    held = _of(dict, record, name)
    shape, columns, fragments = (held.get(key) for key in ("shape", "columns", "fragments"))
    if not (
        isinstance(shape, list)
        and len(shape) <= BOUNDS.dimensions
        and all(map(_is_count, shape))
        and math.prod(shape) < BOUNDS.elements
    ):
        raise Damaged(f"{MANIFEST}: {name} has the shape {shown(shape)}")
    if not (
        isinstance(columns, dict) and all(column in COLUMNS and code in DTYPES for column, code in columns.items())
    ):
        raise Damaged(f"{MANIFEST}: {name} has the columns {shown(columns)}")
    return StoredTensor(
        tuple(shape),
        columns,
        [_fragment(name, shape, each, files) for each in _of(list, fragments, f"{name}.fragments")],
    )


def _fragment(name: str, shape: list[int], record: Any, files: int) -> tuple[int, FlatRange]:
    """The file number and range of a fragment. Raises Damaged unless the box contains it and the tensor the box."""
    if isinstance(record, list) and len(record) == 4:
        file, box, start, stop = record
        ranges = (
            isinstance(box, list)
            and len(box) == len(shape)
            and all(isinstance(pair, list) and len(pair) == 2 for pair in box)
        )
        if ranges and all(type(n) is int for n in (file, start, stop, *(end for pair in box for end in pair))):
            inside = all(0 <= low <= high <= extent for (low, high), extent in zip(box, shape, strict=True))
            if inside and 0 <= file < files and 0 <= start <= stop <= math.prod(high - low for low, high in box):
                return file, FlatRange(tuple((low, high) for low, high in box), start, stop)
    raise Damaged(f"{MANIFEST}: {name} {shape} has a fragment {shown(record)}")
