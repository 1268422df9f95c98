"""A checkpoint as an object for programs: its metadata and any part of any tensor, on one process, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megazero.checkpoint.blocks import DTYPES
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.manager import find
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reader import read_box
from megazero.checkpoint.window import TensorInfo
from megazero.mpu.parameter import Box
from megazero.system.given import given_path, is_whole
from megazero.system.reading import shown


def _is_box(given: object) -> bool:
    """Whether this is a sequence of pairs of whole numbers."""
    return isinstance(given, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and all(map(is_whole, pair)) for pair in given
    )


class Checkpoint:
    """A checkpoint of megazero, for reading. Files are open during `read` only.

    path      the checkpoint's folder; the constructor also takes a folder of checkpoints and picks the newest complete
    run       the resolved configuration of the run that wrote it, by section: run["model"]["hidden_size"]
    progress  iteration, consumed_samples, consumed_tokens, optimizer_steps, loss_scale, probe
    layout    sizes of the axes pp, dp, cp, tp of the run that wrote it; reading does not depend on them
    tensors   every tensor by its global name: shape, and the stored dtype of each column: "weight", and those that the
              optimizer keeps, such as "exp_avg", unless the run had --no-save-optim

    Raises FileNotFoundError if there is no complete checkpoint, Damaged (a CheckpointError) if a file differs from what
    was written, ValueError for another format version and an empty path, and TypeError for what is no path.
    """

    def __init__(self, path: str | Path) -> None:
        folder = given_path("path", path)
        if folder.exists() and not folder.is_dir():
            raise FileNotFoundError(f"{path} is a file, and holds no checkpoint: a checkpoint is a folder")
        found = find(folder)
        if found is None:
            raise FileNotFoundError(f"{path} holds no complete checkpoint")
        self.path, self.run, self.progress, self.layout, self._manifest = (
            found.path,
            found.run,
            found.progress,
            found.layout,
            found.manifest,
        )
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(stored.shape, {column: DTYPES[code] for column, code in stored.columns.items()})
            for name, stored in found.manifest.tensors.items()
        }

    def read(self, name: str, column: str = "weight", box: Box | None = None) -> Tensor:
        """A tensor, or its part within `box` (one (start, stop) per dimension), on the CPU in the stored dtype.

        Reads the blocks that contain a part of it and checks their sha256. Memory: the result and a few blocks. Raises
        KeyError for an unknown name, ValueError for a box outside the tensor, TypeError for what is no box,
        CheckpointError for a column that is not stored, Damaged for altered files.
        """
        shape = self.tensors[name]
        if box is not None and not _is_box(box):
            raise TypeError(
                f"box is {shown(box)}: one (start, stop) for each dimension is needed; all of {name} is "
                f"{tuple((0, extent) for extent in shape.shape)}"
            )
        box = tuple((0, extent) for extent in shape.shape) if box is None else box
        if len(box) != len(shape.shape) or not all(
            0 <= i <= j <= extent for (i, j), extent in zip(box, shape.shape, strict=True)
        ):
            raise ValueError(f"{name} has shape {shape.shape}; {box} does not lie in it")
        if column not in shape.columns:
            raise CheckpointError(f"{self.path} has no {column} of {name}, only {', '.join(shape.columns)}")
        with OpenFiles(self.path, self._manifest) as files:
            return read_box(files, name, box, column)
