"""Writing: each rank writes a file of its own; rank 0 makes the manifest from layout arithmetic and file headers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.checkpoint.blocks import BLOCK_BYTES, BlockFile, BlockWriter, Slot
from megazero.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    FragmentSpec,
    Manifest,
    StoredFile,
    StoredTensor,
    file_name,
    key_of,
    range_of,
)
from megazero.system.durable import sync_folder
from megazero.zero.layout import Fragment, StoredFragment


def write_fragments(
    folder: Path,
    index: int,
    count: int,
    fragments: Sequence[StoredFragment],
    portions: Iterable[Sequence[Fragment]],
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Write these fragments as the file of writer `index` of `count`; without fragments no file is written.

    portions: their values, in any order; one fragment may come in consecutive parts. Each portion is written before the
    next one is asked for. No two writers may write the same element. Communicates nothing. Memory: a portion and a
    block. Raises OSError, and CheckpointError if the portions lack values.
    """
    slots = [
        Slot(key_of(one.spec.name, column, range_of(one)), dtype, one.numel)
        for one in fragments
        for column, dtype in one.dtypes.items()
    ]
    if not slots:
        return
    whole = {one.spec.name: one for one in fragments}
    with BlockWriter(folder / file_name(index, count), slots, block_bytes) as file:
        for portion in portions:
            _write_portion(file, portion, whole)
            del portion  # or its memory would be held while the next one comes


def _write_portion(file: BlockWriter, portion: Sequence[Fragment], whole: Mapping[str, StoredFragment]) -> None:
    for part in portion:
        one = whole[part.spec.name]
        for column, values in part.columns.items():
            file.write(key_of(one.spec.name, column, range_of(one)), part.start - one.start, values)


@dataclass(frozen=True)
class Header:
    """The header of a fragment file: the file's size in bytes, the header's sha256, the dtype ("F32") of each key."""

    size: int
    sha256: str
    dtypes: Mapping[str, str]


def headers_of(folder: Path, names: Iterable[str]) -> dict[str, Header]:
    """The headers of these files of a folder, by name. Raises Damaged if one is missing or is not a fragment file."""

    def header(name: str) -> Header:
        with BlockFile(folder / name) as file:
            return Header(file.size, file.header_sha256, {key: file.dtype(key) for key in file.keys()})  # noqa: SIM118 - not a mapping

    return {name: header(name) for name in names}


def make_manifest(
    writers: Sequence[Sequence[FragmentSpec]],
    headers: Mapping[str, Header],
    *,
    run: dict[str, Any],
    progress: dict[str, Any],
    layout: dict[str, int],
) -> Manifest:
    """The manifest of fragment files that have all been written.

    Names, shapes and fragments come from `writers`: what each writer writes by layout arithmetic. Hashes, dtypes and
    sizes come from `headers`. Raises CheckpointError if the two disagree or the fragments do not make up whole tensors.
    """
    manifest = Manifest({}, [], run, progress, layout)
    for index, held in enumerate(writers):
        if held:
            name = file_name(index, len(writers))
            _add_file(manifest, name, headers[name], held)
    gaps = manifest.missing_elements()
    if gaps:
        listed = ", ".join(f"{name}: {gap}" for name, gap in gaps.items())
        raise CheckpointError(
            "the fragments of all ranks do not make up whole tensors (elements missing; negative: written twice): "
            f"{listed}"
        )
    return manifest


def put_manifest(folder: Path, content: bytes) -> None:
    """Write a manifest into a folder whose fragment files are complete; sync the file and the folder."""
    with open(folder / MANIFEST, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def write_manifest(
    folder: Path,
    writers: Sequence[Sequence[FragmentSpec]],
    *,
    run: dict[str, Any],
    progress: dict[str, Any],
    layout: dict[str, int],
) -> None:
    """Make the manifest of the files in this folder and write it. Raises as `make_manifest` and `put_manifest` do."""
    headers = headers_of(folder, file_names(writers))
    put_manifest(folder, make_manifest(writers, headers, run=run, progress=progress, layout=layout).encode())


def file_names(writers: Sequence[Sequence[FragmentSpec]]) -> list[str]:
    """The file names of these writers; a writer without fragments has none."""
    return [file_name(index, len(writers)) for index, held in enumerate(writers) if held]


def _add_file(manifest: Manifest, name: str, header: Header, fragments: Sequence[FragmentSpec]) -> None:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key, dtype in header.dtypes.items():
        tensor, column, where = key.split("|", 2)
        found.setdefault((tensor, where), {})[column] = dtype
    number = len(manifest.files)
    manifest.files.append(StoredFile(name, header.size, header.sha256))
    for held in fragments:
        flat, tensor = range_of(held), held.spec.name
        columns = found.pop((tensor, key_of("", "", flat).lstrip("|")), None)
        if columns is None:
            raise CheckpointError(f"{name} lacks {tensor} {flat}, which by the layout it must hold")
        stored = manifest.tensors.setdefault(tensor, StoredTensor(held.spec.shape, columns))
        if stored.shape != held.spec.shape or stored.columns != columns:
            raise CheckpointError(
                f"{tensor} is {held.spec.shape} {columns} in {name} and {stored.shape} {stored.columns} in an earlier "
                "file"
            )
        stored.fragments.append((number, flat))
    if found:
        raise CheckpointError(f"{name} holds tensors that are not in the layout: {sorted(found)}")
