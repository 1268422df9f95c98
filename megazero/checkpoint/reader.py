"""Reading into any layout: this rank reads the blocks of saved fragments that contain elements of its own fragments.

Values are copied from a block into the rank's storage and converted to its dtype; besides the state, this takes the
memory of a few blocks. Each file is opened once. Saved and target fragments may differ in dtype, box, range and number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megazero.checkpoint.blocks import BlockFile
from megazero.checkpoint.decoding import decode
from megazero.checkpoint.format import MANIFEST, Damaged, Fragment, FragmentSpec, Manifest, columns_of, key_of, range_of
from megazero.checkpoint.open_files import OpenFiles, check_header
from megazero.checkpoint.reshard import FlatRange, Overlap, overlaps
from megazero.system.reading import BOUNDS, Unreadable, read_bytes

THREADS = 2
"""Threads that read and check blocks. Most of their time goes into sha256."""
_SHOWN = 20


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged if it is missing or altered, ValueError for another version."""
    try:
        raw = read_bytes(folder / MANIFEST, BOUNDS.manifest)
    except Unreadable as error:
        if not folder.is_dir():
            raise Damaged("it is not there") from error
        raise Damaged(str(error) if (folder / MANIFEST).exists() else f"{MANIFEST} is missing") from error
    return decode(raw)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file exists with the size and the header that it was written with. Payloads are not read.

    Raises Damaged, whose message lists the files that fail.
    """
    wrong = []
    for stored in manifest.files:
        try:
            with BlockFile(folder / stored.name) as file:
                check_header(file, stored)
        except Damaged as error:
            wrong.append(str(error))
    if wrong:
        raise Damaged(
            "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more files" if len(wrong) > _SHOWN else "")
        )


def check_inventory(manifest: Manifest, model: Iterable[FragmentSpec], columns: Sequence[str]) -> None:
    """Check that the checkpoint has exactly the tensors of the model, in the model's shapes, with these columns.

    model: the fragments of all ranks. Raises one ValueError that names every difference.
    """
    shapes = {held.spec.name: held.spec.shape for held in model}
    both = sorted(shapes.keys() & manifest.tensors.keys())
    kinds = {
        "missing from the checkpoint": sorted(shapes.keys() - manifest.tensors.keys()),
        "in the checkpoint, not in the model": sorted(manifest.tensors.keys() - shapes.keys()),
        "of another shape (checkpoint -> model)": [
            f"{name} {list(manifest.tensors[name].shape)} -> {list(shapes[name])}"
            for name in both
            if manifest.tensors[name].shape != shapes[name]
        ],
    }
    absent = {column: [name for name in both if column not in manifest.tensors[name].columns] for column in columns}
    kinds |= {
        f"without {column} in the checkpoint (another optimizer? --no-load-optim does without)": names
        for column, names in absent.items()
    }
    if "exp_avg" in columns:  # sgd's momentum and Adam's first moment are different things under one name
        surplus = [
            name for name in both if "exp_avg_sq" in manifest.tensors[name].columns and "exp_avg_sq" not in columns
        ]
        kinds[
            "with exp_avg_sq in the checkpoint, which this optimizer has not (another optimizer? --no-load-optim does "
            "without)"
        ] = surplus
    problems = [f"  {len(names)} {kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise ValueError("the checkpoint does not fit the model:\n" + "\n".join(problems))


def read_fragments(files: OpenFiles, targets: Iterable[Fragment], columns: Sequence[str]) -> int:
    """Fill these columns of the targets in place from the checkpoint of `files`; return the number of bytes read.

    Communicates nothing: each rank reads for itself. Threads read and check blocks while this thread copies earlier
    ones. Memory: two blocks per thread and one more. Raises Damaged if a needed file differs from what was written or
    the checkpoint lacks elements.
    """
    plan = _plan(files.manifest, targets)
    with ThreadPoolExecutor(THREADS) as pool:
        return _read_all(_reads(files, plan, columns), pool)


def _read_all(reads: Iterator[_Read], pool: ThreadPoolExecutor) -> int:
    """Read a few blocks ahead, copy in order; return the number of bytes read."""
    total = 0
    under_way: deque[tuple[Future[Tensor], _Read]] = deque()

    def take() -> int:
        values, read = under_way.popleft()
        tensor = values.result()
        for target, overlap in read.copies:
            overlap.copy(tensor, target)
        return tensor.nbytes

    try:
        for read in reads:
            under_way.append((pool.submit(read.file.read, read.key, read.block), read))
            if len(under_way) > 2 * THREADS:
                total += take()
        while under_way:
            total += take()
    finally:
        for future, _ in under_way:
            future.cancel()
    return total


_Plan = dict[int, dict[tuple[str, FlatRange], list[Fragment]]]
"""For each file number: the needed fragments in it, by name and flat range, with the targets that need them."""


def _plan(manifest: Manifest, targets: Iterable[Fragment]) -> _Plan:
    plan: _Plan = {}
    for target in targets:
        name, wanted = target.spec.name, range_of(target)
        found = 0
        for number, flat in manifest.tensors[name].fragments:
            shared = sum(overlap.numel for overlap in overlaps(flat, wanted))
            if shared:
                plan.setdefault(number, {}).setdefault((name, flat), []).append(target)
                found += shared
        if found != wanted.numel:
            raise Damaged(f"{MANIFEST} lists {found} of the {wanted.numel} elements of {name} {wanted}")
    return plan


@dataclass(frozen=True)
class _Read:
    """One block of a file, and the copies to make from it: (target values, overlap)."""

    file: BlockFile
    key: str
    block: int
    copies: Sequence[tuple[Tensor, Overlap]]


def _reads(files: OpenFiles, plan: _Plan, columns: Sequence[str]) -> Iterator[_Read]:
    """All needed blocks, file by file."""
    for number in sorted(plan):
        for (name, flat), targets in plan[number].items():
            for column in columns:
                yield from _blocks(files[number], name, column, flat, targets)


def _blocks(file: BlockFile, name: str, column: str, flat: FlatRange, targets: Sequence[Fragment]) -> Iterator[_Read]:
    key = key_of(name, column, flat)
    for block, (first, last) in enumerate(file.block_ranges(key)):
        piece = FlatRange(flat.box, flat.start + first, flat.start + last)
        copies = [
            (columns_of(target)[column], overlap) for target in targets for overlap in overlaps(piece, range_of(target))
        ]
        if copies:
            yield _Read(file, key, block, copies)
