"""What a checkpoint is: named global tensors in fragments, and one manifest that says where each lies.

    DIR/latest                                     text: the folder to resume from, written last
    DIR/iter_0000123/manifest.json                 tensors, fragments, files, run, progress
    DIR/iter_0000123/fragments-00001-of-00008.safetensors

A fragment file holds 1-D tensors, each a flat range of a box of a global tensor, under a key that says so. Its number
only keeps names apart: a reader goes by the manifest and by names. Integrity is a chain: the manifest holds its own
sha256 and that of every file's header, a header those of its blocks of payload (`blocks.py`). So a reader checks
exactly what it reads, and no byte that it uses is unchecked. Nothing here is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megazero.checkpoint.reshard import FlatRange
from megazero.zero.fragment import Fragment, FragmentSpec

VERSION = 1
MANIFEST = "manifest.json"
COLUMNS = ("weight", "exp_avg", "exp_avg_sq")
"""What is stored of a parameter: the master weight, the first moment (sgd: its momentum), the second moment."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why, and what to do."""


class Damaged(CheckpointError):
    """A checkpoint that was complete no longer is: the message names the file."""


def columns_of(fragment: Fragment) -> dict[str, Tensor]:
    """The columns that a fragment has, by name."""
    found = ((column, getattr(fragment, column)) for column in COLUMNS)
    return {column: tensor for column, tensor in found if tensor is not None}


def range_of(fragment: FragmentSpec) -> FlatRange:
    """Where a fragment lies in its global tensor."""
    return FlatRange(fragment.spec.box, fragment.start, fragment.stop)


def key_of(name: str, column: str, flat: FlatRange) -> str:
    """The tensor's name in a fragment file: "blocks.3.mlp.up.weight|exp_avg|0:40,0:24|120:360"."""
    box = ",".join(f"{start}:{stop}" for start, stop in flat.box)
    return f"{name}|{column}|{box}|{flat.start}:{flat.stop}"


def file_name(index: int, count: int) -> str:
    """Name of the file that writer `index` of `count` writes."""
    return f"fragments-{index + 1:05d}-of-{count:05d}.safetensors"


@dataclass
class StoredTensor:
    """A global tensor: shape, dtype of each column ("F32"), and fragments as (index into files, flat range)."""

    shape: tuple[int, ...]
    columns: dict[str, str]
    fragments: list[tuple[int, FlatRange]] = field(default_factory=list)


@dataclass(frozen=True)
class StoredFile:
    """A fragment file: its name, its size, and the sha256 of its header, which holds those of its payload."""

    name: str
    size: int
    header_sha256: str


@dataclass
class Manifest:
    """What a checkpoint holds.

    run       the resolved configuration that wrote it, by section
    progress  iteration, consumed samples and tokens, optimizer step count, loss scale, probe: the trainer's own
    layout    sizes of the axes that wrote it, and `places`, the number of folders written to, where there were several;
    for messages
    """

    tensors: dict[str, StoredTensor]
    files: list[StoredFile]
    run: dict[str, Any]
    progress: dict[str, Any]
    layout: dict[str, int]

    @property
    def is_scattered(self) -> bool:
        """Whether it was written into several folders, on the local disks of nodes: each holds this manifest and its
        own ranks' files.
        """
        return self.layout.get("places", 1) > 1

    def encode(self) -> bytes:
        """JSON with one tensor and one file per line, and in the last line the sha256 of all before it."""
        content = _content(self).encode()
        return content + seal(content)

    def missing_elements(self) -> dict[str, int]:
        """Elements that no fragment holds, by tensor; negative where fragments overlap."""
        gaps = {
            name: math.prod(t.shape) - sum(flat.numel for _, flat in t.fragments) for name, t in self.tensors.items()
        }
        return {name: gap for name, gap in gaps.items() if gap}


def _content(manifest: Manifest) -> str:
    def lines(items: Iterable[str], ends: str) -> str:
        return ends[0] + "\n" + ",\n".join(items) + "\n" + ends[1]

    tensors = (f"{json.dumps(name)}: {json.dumps(_tensor_record(t))}" for name, t in sorted(manifest.tensors.items()))
    files = (json.dumps({"name": f.name, "bytes": f.size, "header_sha256": f.header_sha256}) for f in manifest.files)
    sections = {
        "format": json.dumps("megazero-checkpoint"),
        "version": json.dumps(VERSION),
        "progress": json.dumps(manifest.progress, sort_keys=True),
        "layout": json.dumps(manifest.layout, sort_keys=True),
        "run": json.dumps(manifest.run, sort_keys=True),
        "files": lines(files, "[]"),
        "tensors": lines(tensors, "{}"),
    }
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in sections.items())


def _tensor_record(tensor: StoredTensor) -> dict[str, Any]:
    fragments = [[file, flat.box, flat.start, flat.stop] for file, flat in tensor.fragments]
    return {"shape": tensor.shape, "columns": tensor.columns, "fragments": fragments}


def seal(content: bytes) -> bytes:
    """The end of a manifest; of one length, whatever the version, so that a reader of any version can tell damage."""
    return f',\n"sha256": "{hashlib.sha256(content).hexdigest()}"\n}}\n'.encode()
