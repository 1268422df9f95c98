"""Reading into any layout: of every saved fragment, the blocks that hold something this rank needs.

Values go straight from a block into the rank's storage, converted to its dtype; the memory beside the state is a few
blocks. Each file is opened once. The dtype, box, range and number of the fragments on either side are free.
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
"""That read and check blocks; sha256 is what takes the time."""
_SHOWN = 20


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged when it is missing or altered."""
    try:
        raw = read_bytes(folder / MANIFEST, BOUNDS.manifest)
    except Unreadable as error:
        if not folder.is_dir():
            raise Damaged("it is not there") from error
        raise Damaged(str(error) if (folder / MANIFEST).exists() else f"{MANIFEST} is missing") from error
    return decode(raw)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there, of its size, with the header it was written with. Payloads are checked when read.

    Raises Damaged, naming all that are not.
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
    """Check that the checkpoint holds exactly the tensors of the model, in its shapes, with these columns.

    model: everything that all ranks hold. Raises ValueError, one that names every difference.
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
    """Fill these columns of the targets, in place, from the checkpoint whose files these are; the bytes that were read
    for it.

    Communicates nothing: each rank reads for itself. Threads read blocks and check them while others are copied;
    memory: two blocks per thread. Raises Damaged when a file that is needed is not as it was written, or the checkpoint
    lacks elements.
    """
    plan = _plan(files.manifest, targets)
    with ThreadPoolExecutor(THREADS) as pool:
        return _read_all(_reads(files, plan, columns), pool)


def _read_all(reads: Iterator[_Read], pool: ThreadPoolExecutor) -> int:
    """Read ahead by a few blocks, copy in order; the bytes read."""
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
"""By number of the file: the fragments in it that are needed, by name and flat range, and for which targets."""


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
    """One block of a file, and where its values go."""

    file: BlockFile
    key: str
    block: int
    copies: Sequence[tuple[Tensor, Overlap]]


def _reads(files: OpenFiles, plan: _Plan, columns: Sequence[str]) -> Iterator[_Read]:
    """All blocks that are needed, file after file."""
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
