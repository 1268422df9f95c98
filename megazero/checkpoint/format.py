"""The format of a checkpoint: named global tensors in fragments, and one manifest that says where each one is.

    DIR/latest                                     text: the folder to resume from, written last
    DIR/iter_0000123/manifest.json                 tensors, fragments, files, run, progress
    DIR/iter_0000123/fragments-00001-of-00008.safetensors

A fragment file holds 1-D tensors. Each is a flat range of a box of a global tensor, and its key names both. The number
of a file has no meaning; a reader finds it through the manifest. The sha256 digests form a chain: the manifest holds
its own and that of each file's header, and a header holds those of its payload's blocks (`blocks.py`). A reader
therefore checks every byte that it uses and no others. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megazero.checkpoint.reshard import FlatRange
from megazero.system.status import FAILED
from megazero.zero.layout import FragmentSpec
from megazero.zero.sharding import SAVED

VERSION = 1
MANIFEST = "manifest.json"
WEIGHT = "weight"
COLUMNS = tuple(SAVED)
"""The columns that may be stored of a parameter."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why, and what to do."""


class Damaged(CheckpointError):
    """A checkpoint that was complete is damaged now; the message names the file. status: that of a program."""

    status = FAILED


def range_of(fragment: FragmentSpec) -> FlatRange:
    """The range of a fragment in its global tensor."""
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
    """A fragment file: its name, its size in bytes, and the sha256 of its header, which holds those of its payload."""

    name: str
    size: int
    header_sha256: str


@dataclass
class Manifest:
    """The contents of a checkpoint.

    tensors   global tensors by name
    files     fragment files; a tensor's fragments refer to them by index
    run       the resolved configuration of the run that wrote it, by section
    progress  the trainer's iteration, consumed samples and tokens, optimizer steps, loss scale, probe
    layout    sizes of the axes of the run that wrote it, for messages; `places` is the number of folders it was
              written into, if there were several
    """

    tensors: dict[str, StoredTensor]
    files: list[StoredFile]
    run: dict[str, Any]
    progress: dict[str, Any]
    layout: dict[str, int]

    @property
    def is_scattered(self) -> bool:
        """Whether it was written into several folders on the nodes' local disks.

        Each of them holds this manifest and the files of its own ranks.
        """
        return self.layout.get("places", 1) > 1

    def encode(self) -> bytes:
        """JSON with one line for each tensor and file. The last entry is the sha256 of all bytes before it."""
        content = _content(self).encode()
        return content + seal(content)

    def missing_elements(self) -> dict[str, int]:
        """For each tensor whose fragments do not add up: elements of the tensor minus elements of its fragments.

        A positive number means that elements are in no fragment, a negative one that fragments overlap.
        """
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
    """The end of a manifest. Its length is the same in all versions, so that every version's reader detects damage."""
    return f',\n"sha256": "{hashlib.sha256(content).hexdigest()}"\n}}\n'.encode()
