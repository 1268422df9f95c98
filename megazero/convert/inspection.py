"""The contents of a checkpoint as plain records, for `inspect` and for other programs.

A megazero checkpoint is read from its manifest, without building the model; one of another format, through its reader.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.checkpoint import folder as folders
from megazero.checkpoint.format import MANIFEST, Damaged, Manifest
from megazero.checkpoint.manager import open_checkpoint
from megazero.checkpoint.reader import check_files, read_manifest
from megazero.checkpoint.resume_changes import run_from
from megazero.checkpoint.statistics import statistics
from megazero.checkpoint.verify import files_of_other_nodes, verify
from megazero.checkpoint.window import StoredTensors, TensorInfo, WindowedTensors
from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.convert.registry import open_source
from megazero.convert.source import Source

Record = dict[str, Any]
_NATIVE_FILES = "fragments-*-of-*.safetensors"


class SourceTensors:
    """The `WindowedTensors` of a source. It keeps the last tensor that was read, which may be a view of a mapped file.

    Memory: one tensor.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.shapes = {name: TensorInfo(entry.shape, entry.columns) for name, entry in source.entries.items()}
        self._kept: tuple[tuple[str, str], Tensor] | None = None

    def window(self, name: str, column: str, start: int, stop: int) -> Tensor:
        if self._kept is None or self._kept[0] != (name, column):
            self._kept = (name, column), self._source.read(name, column).reshape(-1)
        return self._kept[1][start:stop]


@dataclass
class Inspected:
    """An open checkpoint; a context manager that closes its files.

    path      the folder of this one checkpoint
    format    its name in `registry.format_table`
    run       the configuration of the run that wrote it; what is not known has its default
    position  iteration, consumed samples and tokens and other facts about the training that the format stores
    layout    sizes of the axes of the run that wrote it, by name; None if the format does not store them
    files     size in bytes by name, relative to the folder
    tensors   the tensors, read in windows
    manifest  the manifest, for a megazero checkpoint
    source    the source, for a checkpoint of another format
    """

    path: Path
    format: str
    run: Run
    position: Record
    layout: dict[str, int] | None
    files: dict[str, int]
    tensors: WindowedTensors
    manifest: Manifest | None = None
    source: Source | None = None
    closing: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Inspected:
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(shape.total_bytes for shape in self.tensors.shapes.values())

    def verify(self, threads: int, advance: Callable[[int], None]) -> list[str]:
        """All problems of the files, one sentence each.

        For a megazero checkpoint, every hash is compared. Other programs store no hashes, so every tensor is read once.
        threads: used for a megazero checkpoint. advance: called with the bytes read since its last call.
        """
        if self.manifest is not None:
            return verify(self.path, self.manifest, threads, advance)
        assert self.source is not None
        problems = []
        for name, entry in self.source.entries.items():
            for column in entry.columns:
                try:
                    advance(self.source.read(name, column).nbytes)
                except (ValueError, OSError, RuntimeError) as error:
                    problems.append(f"{name} {column}: {error}")
        return problems


def is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint of megazero or holds such checkpoints, damaged ones included."""
    inside = [path, *(found for _, found in folders.list_checkpoints(path))]
    if any((folder / MANIFEST).is_file() or any(folder.glob(_NATIVE_FILES)) for folder in inside):
        return True
    return path.is_dir() and (folders.latest_name(path) or "").startswith("iter_")


def open_for_inspection(path: Path, format: str | None = None) -> Inspected:
    """Open the checkpoint in a folder, or the one that `latest` names.

    Raises Damaged. Raises ValueError for a folder that is not a checkpoint or cannot be read.
    """
    if format not in (None, "megazero") or not is_ours(path):
        return _open_other(path, format)
    found = folders.newest_checkpoint(path)
    if found is None:
        raise ValueError(f"{path} holds no checkpoint of megazero")
    manifest = open_checkpoint(found).manifest
    tensors = StoredTensors(found, manifest)
    files = {stored.name: stored.size for stored in manifest.files}
    inspected = Inspected(
        found, "megazero", run_from(manifest.run), manifest.progress, manifest.layout, files, tensors, manifest=manifest
    )
    inspected.closing.enter_context(tensors)
    return inspected


def holds_adapters(inspected: Inspected) -> bool:
    """Whether the checkpoint holds adapters instead of a model."""
    return inspected.manifest is not None and inspected.run.lora.lora_rank is not None


def open_merged(inspected: Inspected) -> Inspected:
    """Open the model of a checkpoint of adapters: the base model with the adapters added.

    Raises ConversionError where the base model is not there.
    """
    merged = _open_other(inspected.path, None)
    return replace(merged, format=f"{merged.format}, adapters merged with their base")


def _open_other(path: Path, format: str | None) -> Inspected:
    source = open_source(path, format)
    files = {
        str(file.relative_to(source.path)): file.stat().st_size
        for file in sorted(source.path.rglob("*"))
        if file.is_file()
    }
    inspected = Inspected(
        source.path,
        source.format,
        source.run,
        asdict(source.position),
        None,
        files,
        SourceTensors(source),
        source=source,
    )
    inspected.closing.enter_context(source)
    return inspected


def checkpoints_in(root: Path) -> list[Record]:
    """The checkpoints of a folder by iteration: name, iteration, bytes of the files, whether `latest` names it, and its
    problem or None.

    Reads the manifest and the headers of all files; `verify` reads the rest.
    """
    named = folders.latest_name(root)
    found = []
    for iteration, path in folders.list_checkpoints(root):
        problem, size = None, 0
        try:
            manifest = read_manifest(path)
            absent = files_of_other_nodes(path, manifest)
            size = sum(stored.size for stored in manifest.files)
            check_files(
                path, replace(manifest, files=[stored for stored in manifest.files if stored.name not in absent])
            )
        except (Damaged, ValueError) as error:
            problem = str(error)
        is_latest = path.name.removesuffix(".replaced") == named
        found.append(
            {"name": path.name, "iteration": iteration, "bytes": size, "latest": is_latest, "problem": problem}
        )
    return found


def contents(inspected: Inspected) -> Record:
    """Everything about a checkpoint except the values of its tensors.

    config     every field of the run, by section
    elsewhere  names of files that are on the disks of other nodes
    """
    tensors = {
        name: {
            "shape": list(shape.shape),
            "elements": shape.numel,
            "bytes": shape.total_bytes,
            "columns": {column: str(dtype).removeprefix("torch.") for column, dtype in shape.columns.items()},
        }
        for name, shape in inspected.tensors.shapes.items()
    }
    return {
        "path": str(inspected.path),
        "format": inspected.format,
        "position": dict(inspected.position),
        "layout": inspected.layout,
        "config": run_dict(inspected.run),
        "tensors": tensors,
        "totals": {
            "tensors": len(tensors),
            "parameters": sum(tensor["elements"] for tensor in tensors.values()),
            "bytes": inspected.nbytes,
            "file_bytes": sum(inspected.files.values()),
        },
        "files": inspected.files,
        "elsewhere": [] if inspected.manifest is None else files_of_other_nodes(inspected.path, inspected.manifest),
    }


def tensor_statistics(inspected: Inspected, name: str) -> Record:
    """Statistics of each column of a tensor."""
    return {
        column: statistics(inspected.tensors, name, column).record()
        for column in inspected.tensors.shapes[name].columns
    }


def dtype_names(shape: TensorInfo) -> dict[str, str]:
    """The dtype of each column, by name."""
    return {column: str(dtype).removeprefix("torch.") for column, dtype in shape.columns.items()}
