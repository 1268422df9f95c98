"""Reading into any layout: this rank reads the blocks of saved fragments that contain elements of its own fragments.

A state gives its fragments in portions. Values are copied from a block into the portion's tensors and converted to its
dtype; besides the portion, this takes the memory of a few blocks. Saved and target fragments may differ in dtype, box,
range and number. A parameter that one of both has in parts (`ParameterSpec.parts_dim`) is read as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.blocks import DTYPES, BlockFile
from megazero.checkpoint.decoding import decode
from megazero.checkpoint.format import MANIFEST, Damaged, FragmentSpec, Manifest, key_of, range_of
from megazero.checkpoint.open_files import OpenFiles, check_header
from megazero.checkpoint.reshard import FlatRange, Overlap, overlaps
from megazero.mpu.parameter import Box, ParameterKind, ParameterSpec, merged, own_box
from megazero.system.reading import BOUNDS, Unreadable, read_bytes
from megazero.zero.layout import Fragment

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
    _require_none(wrong)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """As `check_files`, without opening the files."""
    wrong = []
    for stored in manifest.files:
        try:
            size = (folder / stored.name).stat().st_size
        except OSError as error:
            wrong.append(f"{stored.name}: {error.strerror}")
            continue
        if size != stored.size:
            wrong.append(f"{stored.name} has {size} bytes instead of {stored.size}")
    _require_none(wrong)


def _require_none(wrong: Sequence[str]) -> None:
    if wrong:
        raise Damaged(
            "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more files" if len(wrong) > _SHOWN else "")
        )


def check_inventory(manifest: Manifest, model: Iterable[FragmentSpec], columns: Sequence[str]) -> None:
    """Check that the checkpoint has exactly the tensors of the model, in the model's shapes, with these columns.

    model: the fragments of all ranks. Raises one ValueError that names every difference.
    """
    specs = {held.spec.name: held.spec for held in model}
    shapes = {name: spec.whole_shape for name, spec in specs.items()}
    both = sorted(shapes.keys() & manifest.tensors.keys())
    kinds = {
        "missing from the checkpoint": sorted(shapes.keys() - manifest.tensors.keys()),
        "in the checkpoint, not in the model": sorted(manifest.tensors.keys() - shapes.keys()),
        "of another shape (checkpoint -> model)": [
            f"{name} {list(manifest.tensors[name].shape)} -> {list(shapes[name])}"
            for name in both
            if manifest.tensors[name].shape != specs[name].shape
            and not has_parts(manifest.tensors[name].shape, specs[name])
        ],
    }
    absent = {column: [name for name in both if column not in manifest.tensors[name].columns] for column in columns}
    kinds |= {
        f"without {column} in the checkpoint (of --no-save-optim or another optimizer? --no-load-optim does without)": (
            names
        )
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


def has_parts(stored: tuple[int, ...], spec: ParameterSpec) -> bool:
    """Whether a shape in a checkpoint is another one than a spec's, of the same numbers in the same order: one of both
    has a dimension of the parameter in parts, or both have, and in other numbers of parts.
    """
    if stored == spec.shape:
        return False
    whole = spec.whole_shape
    return stored == whole or any(merged(stored, dim) == whole for dim in range(len(stored) - 1))


def read_fragments(files: OpenFiles, targets: Sequence[Fragment], columns: Sequence[str]) -> int:
    """As `read_portions`, of one portion."""
    return read_portions(files, [targets], iter([targets]), columns)


def read_box(files: OpenFiles, name: str, box: Box, column: str) -> Tensor:
    """The part of a tensor within a box, on the CPU in the stored dtype. Memory: the result and a few blocks. Raises as
    `read_portions`.
    """
    stored = files.manifest.tensors[name]
    extents = tuple(stop - start for start, stop in box)
    values = torch.empty(extents, dtype=DTYPES[stored.columns[column]])
    spec = ParameterSpec(name, stored.shape, box, extents, ParameterKind.MATRIX)
    read_fragments(files, [Fragment(spec, 0, values.numel(), {column: values.view(-1)})], [column])
    return values


def read_whole(files: OpenFiles, name: str, column: str) -> Tensor:
    """As `read_box`, all of the tensor."""
    return read_box(files, name, tuple((0, extent) for extent in files.manifest.tensors[name].shape), column)


def read_portions(
    files: OpenFiles,
    held: Sequence[Sequence[FragmentSpec]],
    portions: Iterator[Sequence[Fragment]],
    columns: Sequence[str],
) -> int:
    """Fill these columns of all portions in place from the checkpoint of `files`; return the number of bytes read.

    held: the fragments of each portion, which `portions` gives with values. One portion is held at a time: it is filled
    before the next one is asked for. Communicates nothing: each rank reads for itself. Threads read and check blocks
    while this thread copies earlier ones, those of the next portion too. Memory besides: two blocks per thread and one
    more. Raises Damaged if a needed file differs from what was written or the checkpoint lacks elements.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        ahead = _ReadAhead(files, held, columns, pool)
        try:
            total = sum(ahead.fill(number, fragments, portions) for number, fragments in enumerate(held))
            surplus = next(portions, None)  # the last portion is stored when the next one is asked for
            assert surplus is None, "more portions than were told"
            return total
        finally:
            ahead.cancel()


class _ReadAhead:
    """Blocks that threads read in the order of portions and files, a few ahead of the copies."""

    def __init__(
        self, files: OpenFiles, held: Sequence[Sequence[FragmentSpec]], columns: Sequence[str], pool: ThreadPoolExecutor
    ) -> None:
        reads = _reads(files, held, columns)
        self._reads, self._pool = reads, pool
        self._whole = _WholeTensors(files, columns)
        self._under_way = deque[tuple[Future[Tensor], _Read]]()

    def fill(self, number: int, held: Sequence[FragmentSpec], portions: Iterator[Sequence[Fragment]]) -> int:
        """Fill portion `number`, which is the next one; return the number of bytes read."""
        self._submit()
        portion, total = next(portions), 0
        assert [(one.spec, one.start, one.stop) for one in portion] == [(one.spec, one.start, one.stop) for one in held]
        while self._under_way and self._under_way[0][1].portion == number:
            values, read = self._under_way.popleft()
            block = values.result()
            self._submit()
            for index, overlap in read.copies:
                overlap.copy(block, portion[index].columns[read.column])
            total += block.nbytes
        return total + sum(self._whole.fill(fragment) for fragment in portion)

    def _submit(self) -> None:
        for read in islice(self._reads, 2 * THREADS - len(self._under_way)):
            self._under_way.append((self._pool.submit(read.file.read, read.key, read.block), read))

    def cancel(self) -> None:
        for values, _ in self._under_way:
            values.cancel()


class _WholeTensors:
    """Parameters in other shapes than a checkpoint's, each read as a whole: of the last one the values are kept, since
    its fragments follow each other.
    """

    def __init__(self, files: OpenFiles, columns: Sequence[str]) -> None:
        self._files, self._columns = files, columns
        self._last: tuple[str, dict[str, Tensor]] = "", {}

    def fill(self, fragment: Fragment) -> int:
        """Fill a fragment if its tensor has another shape; return the number of bytes read."""
        spec = fragment.spec
        stored = self._files.manifest.tensors[spec.name]
        if not has_parts(stored.shape, spec):
            return 0
        read = 0
        if self._last[0] != spec.name:
            self._last = spec.name, {}  # one parameter at a time
            self._last = spec.name, {column: read_whole(self._files, spec.name, column) for column in self._columns}
            read = sum(values.nbytes for values in self._last[1].values())
        for column, values in self._last[1].items():
            box = own_box(values.view(spec.shape), spec).reshape(-1)
            fragment.columns[column].copy_(box[fragment.start : fragment.stop])
        return read


_Plan = dict[int, dict[tuple[str, FlatRange], list[int]]]
"""For each file number: the needed fragments in it, by name and flat range, with the indices of the targets."""


def _plan(manifest: Manifest, wanted: Sequence[FragmentSpec]) -> _Plan:
    plan: _Plan = {}
    for index, target in enumerate(wanted):
        name, own = target.spec.name, range_of(target)
        if has_parts(manifest.tensors[name].shape, target.spec):
            continue
        found = 0
        for number, flat in manifest.tensors[name].fragments:
            shared = sum(overlap.numel for overlap in overlaps(flat, own))
            if shared:
                plan.setdefault(number, {}).setdefault((name, flat), []).append(index)
                found += shared
        if found != own.numel:
            raise Damaged(f"{MANIFEST} lists {found} of the {own.numel} elements of {name} {own}")
    return plan


@dataclass(frozen=True)
class _Read:
    """One block of a file, and the copies to make from it into a portion: (index of the target, overlap)."""

    portion: int
    file: BlockFile
    key: str
    block: int
    column: str
    copies: Sequence[tuple[int, Overlap]]


def _reads(files: OpenFiles, held: Sequence[Sequence[FragmentSpec]], columns: Sequence[str]) -> Iterator[_Read]:
    """All needed blocks, portion by portion, and file by file within one. The plan of one portion exists at a time."""
    for portion, fragments in enumerate(held):
        plan = _plan(files.manifest, fragments)
        for number in sorted(plan):
            for (name, flat), targets in plan[number].items():
                for column in columns:
                    key, file = key_of(name, column, flat), files[number]
                    for block, (first, last) in enumerate(file.block_ranges(key)):
                        piece = FlatRange(flat.box, flat.start + first, flat.start + last)
                        copies = [(i, each) for i in targets for each in overlaps(piece, range_of(fragments[i]))]
                        if copies:
                            yield _Read(portion, file, key, block, column, copies)
