"""Reading into any layout: of every saved fragment, the blocks that hold something this rank needs.

Values go straight from a block into the rank's storage, converted to its dtype; the memory beside the state is one
block. Each file is opened once. The dtype, box, range and number of the fragments on either side are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from megazero.checkpoint.blocks import BlockFile
from megazero.checkpoint.format import MANIFEST, Damaged, Fragment, Held, Manifest, StoredFile, columns_of, decode, key_of, span_of
from megazero.checkpoint.reshard import Span, overlaps

_SHOWN = 20


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged when it is missing or altered."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"{MANIFEST} is missing" if folder.is_dir() else "it is not there") from error
    return decode(raw)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there, of its size, with the header it was written with. Payloads are checked when read.

    Raises Damaged, naming all that are not.
    """
    wrong = []
    for stored in manifest.files:
        try:
            with BlockFile(folder / stored.name) as file:
                _check_header(file, stored)
        except Damaged as error:
            wrong.append(str(error))
    if wrong:
        raise Damaged("; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more files" if len(wrong) > _SHOWN else ""))


def _check_header(file: BlockFile, stored: StoredFile) -> None:
    if file.size != stored.size:
        raise Damaged(f"{stored.name} has {file.size} bytes instead of {stored.size}")
    if file.header_sha256 != stored.header_sha256:
        raise Damaged(f"{stored.name} is altered: the sha256 of its header is not the recorded one")


def check_inventory(manifest: Manifest, model: Iterable[Held], columns: Sequence[str]) -> None:
    """Check that the checkpoint holds exactly the tensors of the model, in its shapes, with these columns.

    model: everything that all ranks hold. Raises ValueError, one that names every difference.
    """
    shapes = {held.place.name: held.place.shape for held in model}
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
        f"without {column} in the checkpoint (another optimizer? --no-load-optim does without)": names for column, names in absent.items()
    }
    if "exp_avg" in columns:  # sgd's momentum and Adam's first moment are different things under one name
        surplus = [name for name in both if "exp_avg_sq" in manifest.tensors[name].columns and "exp_avg_sq" not in columns]
        kinds["with exp_avg_sq in the checkpoint, which this optimizer has not (another optimizer? --no-load-optim does without)"] = surplus
    problems = [f"  {len(names)} {kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise ValueError("the checkpoint does not fit the model:\n" + "\n".join(problems))


def read_fragments(folder: Path, manifest: Manifest, targets: Iterable[Fragment], columns: Sequence[str]) -> None:
    """Fill these columns of the targets, in place, from the checkpoint.

    Communicates nothing: each rank reads for itself. Raises Damaged when a file that is needed is not as it was
    written, or the checkpoint lacks elements.
    """
    plan: dict[int, dict[tuple[str, Span], list[Fragment]]] = defaultdict(lambda: defaultdict(list))
    for target in targets:
        name, wanted = target.place.name, span_of(target)
        found = 0
        for number, span in manifest.tensors[name].fragments:
            shared = sum(overlap.numel for overlap in overlaps(span, wanted))
            if shared:
                plan[number][name, span].append(target)
                found += shared
        if found != wanted.numel:
            raise Damaged(f"{MANIFEST} lists {found} of the {wanted.numel} elements of {name} {wanted}")
    for number in sorted(plan):
        stored = manifest.files[number]
        with BlockFile(folder / stored.name) as file:
            _check_header(file, stored)
            for (name, span), into in plan[number].items():
                for column in columns:
                    _read_column(file, name, column, span, into)


def _read_column(file: BlockFile, name: str, column: str, span: Span, targets: Sequence[Fragment]) -> None:
    key = key_of(name, column, span)
    for block, (first, last) in enumerate(file.block_ranges(key)):
        piece = Span(span.box, span.start + first, span.start + last)
        copies = [(target, overlap) for target in targets for overlap in overlaps(piece, span_of(target))]
        if not copies:
            continue
        values = file.read(key, block)
        for target, overlap in copies:
            overlap.copy(values, columns_of(target)[column])
