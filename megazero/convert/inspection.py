"""The contents of a checkpoint as plain records, for `inspect` and for other programs.

A megazero checkpoint is read from its manifest, without building the model; one of another format, through its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from megazero.checkpoint.statistics import difference, statistics
from megazero.checkpoint.verify import files_of_other_nodes, verify
from megazero.checkpoint.window import StoredTensors, TensorInfo, WindowedTensors
from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.config.shape import SHAPE
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


def compare(a: Inspected, b: Inspected, advance: Callable[[int], None]) -> Record:
    """The differences between two checkpoints of any formats and layouts.

    config     fields that differ: [a's value, b's]. If one of the two is of another format, only the model's shape,
               with derived values filled in, and the precision are compared: the other fields are megazero's own
    tensors    by name and column: elements, bit_equal, largest and relative difference (None: not finite)
    identical  whether tensors and the model's shape are the same: names, shapes, columns, dtypes and every bit

    advance: called with the bytes compared since its last call. Memory: a few windows, or a tensor of another format.
    """
    ours, theirs = a.tensors.shapes, b.tensors.shapes
    both = [name for name in ours if name in theirs]
    shapes = {
        name: [list(ours[name].shape), list(theirs[name].shape)]
        for name in both
        if ours[name].shape != theirs[name].shape
    }
    columns = {
        name: [_dtypes(ours[name]), _dtypes(theirs[name])]
        for name in both
        if dict(ours[name].columns) != dict(theirs[name].columns)
    }
    tensors: dict[str, Record] = {}
    same = True
    for name in (name for name in both if name not in shapes):
        for column in (column for column in ours[name].columns if column in theirs[name].columns):
            found = difference(a.tensors, b.tensors, name, column)
            same = same and found.same
            tensors.setdefault(name, {})[column] = found.record()
            advance(ours[name].numel * (ours[name].columns[column].itemsize + theirs[name].columns[column].itemsize))
    config = _config_difference(a, b)
    only = [[name for name in mine if name not in other] for mine, other in ((ours, theirs), (theirs, ours))]
    return {
        "paths": [str(a.path), str(b.path)],
        "formats": [a.format, b.format],
        "identical": same and not (only[0] or only[1] or shapes or columns) and _shape(a.run) == _shape(b.run),
        "config": config,
        "position": _differing(a.position, b.position) if a.format == b.format else {},
        "layout": [a.layout, b.layout] if a.layout != b.layout else None,
        "only_in_first": only[0],
        "only_in_second": only[1],
        "shapes": shapes,
        "columns": columns,
        "tensors": tensors,
    }


def compared_bytes(a: Inspected, b: Inspected) -> int:
    """The number of bytes that `compare` reads."""
    total = 0
    for name, shape in a.tensors.shapes.items():
        other = b.tensors.shapes.get(name)
        if other is not None and other.shape == shape.shape:
            common = [column for column in shape.columns if column in other.columns]
            total += shape.numel * sum(
                shape.columns[column].itemsize + other.columns[column].itemsize for column in common
            )
    return total


def _dtypes(shape: TensorInfo) -> dict[str, str]:
    return {column: str(dtype).removeprefix("torch.") for column, dtype in shape.columns.items()}


def _config_difference(a: Inspected, b: Inspected) -> dict[str, dict[str, list[Any]]]:
    mine, other = run_dict(a.run), run_dict(b.run)
    if a.manifest is None or b.manifest is None:
        mine, other = (
            {"model": _shape(each.run), "optimizer": {"precision": each.run.optimizer.precision}} for each in (a, b)
        )
    sections = {section: _differing(mine[section], other[section]) for section in mine}
    return {section: fields for section, fields in sections.items() if fields}


def _shape(run: Run) -> dict[str, Any]:
    """The settings of a model that its weights determine, without settings of training such as the sequence length."""
    return {name: value(run.model) for name, value in SHAPE.items()}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in sorted({*a, *b}) if a.get(key) != b.get(key)}
