"""Reading and writing megazero's own checkpoints, one whole tensor at a time.

`--load` and `--init-from` take the folder that is written: DIR/latest and DIR/iter_NNNNNNN. Files that are not tensors
(config.json, a tokenizer) go into a subfolder of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint import folder as folders
from megazero.checkpoint.blocks import DTYPES
from megazero.checkpoint.format import MANIFEST, CheckpointError, Damaged, Manifest
from megazero.checkpoint.narrowing import narrowed
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reader import check_files, read_box, read_manifest
from megazero.checkpoint.resume_changes import record_of, run_from
from megazero.checkpoint.window import TensorInfo, windows
from megazero.checkpoint.writer import write_fragments, write_manifest
from megazero.config.dtypes import PRECISION_OF, compute_dtype
from megazero.config.schema import CheckpointConfig, Run, TrainerConfig
from megazero.convert.companions import companions, read_contents, write_companions
from megazero.convert.formats import Advance, Format, TargetOptions
from megazero.convert.source import WEIGHT, ConversionError, DamagedCheckpoint, Source, SourcePosition, parameter_specs
from megazero.mpu.parameter import Box, ParameterSpec
from megazero.system.reading import path_error
from megazero.system.words import counted
from megazero.zero.layout import Fragment, StoredFragment

FILE_BYTES = 4 << 30
"""A fragment file is closed once it holds this many bytes."""
PART = 1 << 24
"""Elements that are converted and written at once."""


class NativeSource(Source):
    """A checkpoint of megazero, of any layout.

    The entries of a checkpoint of adapters are the adapters. `lora.merged.AdaptedSource` makes a model of it.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        run = run_from(manifest.run)
        wanted = parameter_specs(run.model, adapters=run.lora if run.lora.lora_rank else None)
        entries = {name: _entry(manifest, name) for name in wanted if name in manifest.tensors}
        _refuse_misfits(path, manifest, wanted)
        progress = manifest.progress
        position = SourcePosition(
            int(progress.get("iteration", 0)),
            int(progress.get("consumed_samples", 0)),
            int(progress.get("consumed_tokens", 0)),
            float(progress.get("optimizer_steps", 0.0)),
            progress.get("loss_scale") or None,
        )
        super().__init__("megazero", path, run, entries, position, companions(path))
        self.manifest = manifest
        self._files = self.closing.enter_context(OpenFiles(path, manifest))
        self.report.mapped += [f"{name} {column}" for name in entries for column in self.columns]
        left_out = dict.fromkeys(column for entry in entries.values() for column in entry.columns)
        self.report.notes += [
            f"{column} is not carried over: only a run that resumes has it"
            for column in left_out
            if column not in self.columns
        ]

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        return self.read_box(name, tuple((0, size) for size in self.entries[name].shape), column)

    def read_box(self, name: str, box: Box, column: str = WEIGHT) -> Tensor:
        """Reads only the blocks of the files that hold a part of the box."""
        try:
            return read_box(self._files, name, box, column)
        except CheckpointError as error:
            raise _refused(error, path_error(self.path, error)) from error


def _refused(error: Exception, message: str) -> ConversionError:
    return DamagedCheckpoint(message) if isinstance(error, Damaged) else ConversionError(message)


def _entry(manifest: Manifest, name: str) -> TensorInfo:
    stored = manifest.tensors[name]
    return TensorInfo(stored.shape, {column: DTYPES[code] for column, code in stored.columns.items()})


def _refuse_misfits(path: Path, manifest: Manifest, wanted: dict[str, ParameterSpec]) -> None:
    missing = [name for name in wanted if name not in manifest.tensors]
    surplus = [name for name in manifest.tensors if name not in wanted]
    shapes = [
        f"{name} {list(manifest.tensors[name].shape)} instead of {list(spec.shape)}"
        for name, spec in wanted.items()
        if name in manifest.tensors and manifest.tensors[name].shape != spec.shape
    ]
    kinds = {"missing": missing, "not of the model": surplus, "of another shape": shapes}
    problems = [
        f"{counted(len(names), 'tensor')} {kind}: {', '.join(names[:20])}" for kind, names in kinds.items() if names
    ]
    if problems:
        raise ConversionError(f"{path} does not hold the model that it says it holds: " + "; ".join(problems))


def _found(path: Path) -> Path | None:
    try:
        return folders.newest_checkpoint(path)
    except CheckpointError as error:
        raise _refused(error, str(error)) from error


def recognises(path: Path) -> bool:
    """Whether a folder has a manifest, or holds such folders. Megatron-LM's folders have the same names."""
    return any((folder / MANIFEST).exists() for folder in (path, *(one for _, one in folders.list_checkpoints(path))))


def open_native(path: Path) -> NativeSource:
    """Open the checkpoint in this folder, or the newest of a folder of checkpoints. Raises ConversionError."""
    found = _found(path)
    if found is None:
        raise ConversionError(f"{path} holds no checkpoint of megazero")
    try:
        manifest = read_manifest(found)
        check_files(found, manifest)
        return NativeSource(found, manifest)
    except (CheckpointError, ValueError) as error:
        raise error if isinstance(error, ConversionError) else _refused(error, path_error(found, error)) from error


def write_native(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """Write a folder of one checkpoint, with the moments if the source has them.

    Weights keep the source's dtype (with moments, that of the fp32 master), unless `options.dtype` is set. Moments keep
    their dtype. advance: called with the bytes read since its last call. Memory: one tensor.
    """
    inside = folder / folders.folder_name(source.position.iteration)
    inside.mkdir(parents=True)
    files = list(_files(source, options))
    for index, fragments in enumerate(files):
        write_fragments(inside, index, len(files), fragments, _portions(source, fragments, advance))
    run = _as_recorded(source.run, options.dtype)
    write_manifest(
        inside, files, run=record_of(run), progress=_progress(source), layout={"pp": 1, "dp": 1, "cp": 1, "tp": 1}
    )
    write_companions(read_contents(source.companions, source.report.notes.append), inside)
    (folder / folders.LATEST).write_text(f"{inside.name}\n")


def _files(source: Source, options: TargetOptions) -> Iterator[list[StoredFragment]]:
    """The fragments of each file, in the model's order."""
    everything = parameter_specs(source.model)
    group: list[StoredFragment] = []
    size = 0
    for name, entry in source.entries.items():
        dtypes = {
            column: (options.dtype if column == WEIGHT else None) or entry.columns[column] for column in source.columns
        }
        group.append(StoredFragment(everything[name], 0, entry.numel, dtypes))
        size += sum(entry.nbytes(column) for column in source.columns)
        if size >= FILE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _portions(source: Source, fragments: Sequence[StoredFragment], advance: Advance) -> Iterator[list[Fragment]]:
    """The values of these fragments. One tensor is in memory at a time, and is converted part by part."""
    for held in fragments:
        for column, dtype in held.dtypes.items():
            values = source.read(held.spec.name, column).reshape(-1)
            for start, stop in windows(held.numel, PART):
                yield [Fragment(held.spec, start, stop, {column: narrowed(values[start:stop], dtype, held.spec.name)})]
            advance(values.nbytes)
            del values  # or it would be held while the next one is read


def _as_recorded(run: Run, dtype: torch.dtype | None) -> Run:
    """The run without the settings of one start (folders, intervals), with the precision of this dtype."""
    run = replace(run, checkpoint=CheckpointConfig(), trainer=TrainerConfig())
    if dtype is None or dtype == compute_dtype(run.optimizer.precision):
        return run
    return replace(run, optimizer=replace(run.optimizer, precision=PRECISION_OF[dtype]))


def _progress(source: Source) -> dict[str, Any]:
    if isinstance(source, NativeSource):
        return source.manifest.progress
    progress = asdict(source.position)
    progress["loss_scale"] = dict(source.position.loss_scale or {})
    return progress | {"fp8": None, "data_plans": None, "probe": None}


FORMAT = Format("megazero", recognises, open_native, write_native, has_optimizer=True, has_companions=True)
