"""A checkpoint for programs: what it holds, and any part of any tensor, on one process and without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.blocks import DTYPES
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.manager import find
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reader import read_fragments
from megazero.checkpoint.window import TensorInfo
from megazero.mpu.parameter import Box, ParameterKind, ParameterSpec
from megazero.zero.fragment import Fragment


class Checkpoint:
    """A checkpoint of megazero, open for reading; holds no file open.

    path      a checkpoint's folder, or a folder of checkpoints, of which the newest complete one is taken
    run       the resolved configuration that wrote it, by section: run["model"]["hidden_size"]
    progress  iteration, consumed_samples, consumed_tokens, optimizer_steps, loss_scale, probe
    layout    sizes of the axes pp, dp, cp, tp that wrote it; reading does not depend on them
    tensors   every tensor by its global name: shape, and the stored dtype of "weight", "exp_avg", "exp_avg_sq"

    Raises CheckpointError (Damaged, where a file is not as it was written) and FileNotFoundError where there is none.
    """

    def __init__(self, path: str | Path) -> None:
        found = find(Path(path).expanduser())
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
        """A tensor on the CPU in its stored dtype, or the part of it within `box`, one (start, stop) per dimension.

        Reads the blocks that hold something of it, and checks their hashes. Memory: the result and one block.
        """
        shape = self.tensors[name]
        box = tuple((0, extent) for extent in shape.shape) if box is None else box
        if len(box) != len(shape.shape) or not all(
            0 <= i <= j <= extent for (i, j), extent in zip(box, shape.shape, strict=True)
        ):
            raise ValueError(f"{name} has shape {shape.shape}; {box} does not lie in it")
        if column not in shape.columns:
            raise CheckpointError(f"{self.path} has no {column} of {name}, only {', '.join(shape.columns)}")
        extents = tuple(stop - start for start, stop in box)
        values = torch.empty(extents, dtype=shape.columns[column])
        part = Fragment(
            ParameterSpec(name, shape.shape, box, extents, ParameterKind.MATRIX),
            0,
            values.numel(),
            **{column: values.view(-1)},
        )
        with OpenFiles(self.path, self._manifest) as files:
            read_fragments(files, [part], [column])
        return values
