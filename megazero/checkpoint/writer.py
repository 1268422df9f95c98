"""Writing: every rank its own file, rank 0 the manifest, from layout arithmetic and the files' headers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megazero.checkpoint.blocks import BLOCK_BYTES, BlockFile, write_file
from megazero.checkpoint.fence import sync_folder
from megazero.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    Fragment,
    Held,
    Manifest,
    StoredFile,
    StoredTensor,
    columns_of,
    file_name,
    key_of,
    span_of,
)


def is_written(held: Held, tp_index: int) -> bool:
    """Whether a rank with this tp index writes the fragment: of replicas over tp, the first."""
    return held.start < held.stop and (held.place.tp_sharded or tp_index == 0)


def write_fragments(folder: Path, index: int, count: int, fragments: Iterable[Fragment], block_bytes: int = BLOCK_BYTES) -> None:
    """Write these fragments, none of which another writer has, as the file of writer `index` of `count`; no file for none.

    Nothing is communicated. Memory: one block. Raises OSError.
    """
    tensors = [
        (key_of(fragment.place.name, column, span_of(fragment)), tensor)
        for fragment in fragments
        for column, tensor in columns_of(fragment).items()
    ]
    if tensors:
        write_file(folder / file_name(index, count), tensors, block_bytes)


def write_manifest(
    folder: Path, writers: Sequence[Sequence[Held]], *, run: dict[str, Any], progress: dict[str, Any], layout: dict[str, int]
) -> None:
    """Write the manifest of a folder whose fragment files are all there, and sync both.

    writers: what each writer was to write, by layout arithmetic: the tensors and fragments come from it. The files'
    headers give hashes, dtypes and sizes, and must hold exactly what arithmetic says; a gather of the headers to rank 0 was
    rejected, for the files are on the file system that all ranks share. Raises CheckpointError when the two disagree or
    the fragments do not make up whole tensors.
    """
    manifest = Manifest({}, [], run, progress, layout)
    for index, held in enumerate(writers):
        if held:
            _add_file(manifest, folder / file_name(index, len(writers)), held)
    gaps = manifest.missing_elements()
    if gaps:
        listed = ", ".join(f"{name}: {gap}" for name, gap in gaps.items())
        raise CheckpointError(
            f"the fragments of all ranks do not make up whole tensors (elements missing; negative: written twice): {listed}"
        )
    with open(folder / MANIFEST, "xb") as file:
        file.write(manifest.encode())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _add_file(manifest: Manifest, path: Path, fragments: Sequence[Held]) -> None:
    with BlockFile(path) as file:
        found: dict[tuple[str, str], dict[str, str]] = {}
        for key in file.keys():  # noqa: SIM118 - not a mapping
            name, column, box, flat = key.split("|")
            found.setdefault((name, f"{box}|{flat}"), {})[column] = file.dtype(key)
        number = len(manifest.files)
        manifest.files.append(StoredFile(path.name, file.size, file.header_sha256))
    for held in fragments:
        span, name = span_of(held), held.place.name
        columns = found.pop((name, key_of("", "", span).lstrip("|")), None)
        if columns is None:
            raise CheckpointError(f"{path.name} lacks {name} {span}, which by the layout it must hold")
        stored = manifest.tensors.setdefault(name, StoredTensor(held.place.shape, columns))
        if stored.shape != held.place.shape or stored.columns != columns:
            raise CheckpointError(
                f"{name} is {held.place.shape} {columns} in {path.name} and {stored.shape} {stored.columns} in an earlier file"
            )
        stored.fragments.append((number, span))
    if found:
        raise CheckpointError(f"{path.name} holds what the layout does not know of: {sorted(found)}")
