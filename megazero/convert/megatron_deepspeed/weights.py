"""The layer files of a checkpoint: 16-bit weights in one file per layer and tp rank. They do not depend on the number
of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.config.inventory import TABLES, tp_axis
from megazero.config.schema import ModelConfig
from megazero.convert.megatron_deepspeed.folders import Files, Listing
from megazero.convert.megatron_deepspeed.names import Layers, PipelineTensor, theirs, why_ignored
from megazero.convert.report import ConversionReport
from megazero.convert.shards import join_shards
from megazero.convert.source import ConversionError, parameter_specs

"""Tables whose last rows pad the vocabulary."""


@dataclass(frozen=True)
class LayerTensor:
    """Shape and dtype of a tensor in a layer file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_layers(files: Files, listing: Listing) -> dict[int, tuple[Mapping[str, LayerTensor], ...]]:
    """layer -> for each tp rank: key -> shape and dtype. Reads no values.

    Raises ConversionError where the ranks of a layer have different keys.
    """
    found: dict[int, tuple[Mapping[str, LayerTensor], ...]] = {}
    for layer, paths in listing.layers.items():
        ranks = []
        for path in paths:
            content = files[path]
            if not isinstance(content, dict):
                raise ConversionError(f"{path} holds a {type(content).__name__} and no dictionary of tensors")
            ranks.append(
                {
                    key: LayerTensor(tuple(value.shape), value.dtype)
                    for key, value in content.items()
                    if isinstance(value, Tensor)
                }
            )
        if any(set(rank) != set(ranks[0]) for rank in ranks):
            raise ConversionError(f"{listing.folder}: the tp ranks' files of layer {layer} do not hold the same keys")
        found[layer] = tuple(ranks)
    return found


class Weights:
    """The model's tensors in the layer files.

    Raises ConversionError with everything that is missing, too much, or of another shape.
    """

    def __init__(
        self,
        files: Files,
        listing: Listing,
        stored: Mapping[int, tuple[Mapping[str, LayerTensor], ...]],
        layers: Layers,
        model: ModelConfig,
        report: ConversionReport,
    ) -> None:
        self.files, self.listing, self.stored, self.layers, self.model, self.report = (
            files,
            listing,
            stored,
            layers,
            model,
            report,
        )
        self.shapes = {name: spec.shape for name, spec in parameter_specs(model).items()}
        head_key = "lm_head.weight" if layers.head is None or "lm_head.weight" in stored[layers.head][0] else "weight"
        self.theirs = theirs(model, layers, head_key)
        problems = self._missing() + self._surplus()
        problems += [self._misfit(name) for name in self.theirs if not problems and self._misfit(name)]
        if problems:
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise ConversionError(
                f"{listing.folder} does not hold the model that its arguments describe: "
                + "; ".join(problems[:20] + more)
            )

    def read(self, name: str) -> Tensor:
        """One of our global tensors, without vocabulary padding."""
        where = self.theirs[name]
        pieces = [halved(self.files[path][where.key], where) for path in self.listing.layers[where.layer]]
        return join_shards(label(where), pieces, tp_axis(name), self.report, self.rows(name))

    def pair_with_weights(self, name: str, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Parts of a global tensor of another column, each with the part of the layer files' tensor at the same place.
        They are views, unless replicas differ.
        """
        where, axis = self.theirs[name], tp_axis(name)
        if axis is None:
            return [(whole, self.read(name))]
        pieces = [halved(self.files[path][where.key], where) for path in self.listing.layers[where.layer]]
        size = pieces[0].shape[axis]
        found = []
        for t, piece in enumerate(pieces):
            length = max(0, min(size, whole.shape[axis] - t * size))
            if length:
                found.append((whole.narrow(axis, t * size, length), piece.narrow(axis, 0, length)))
        return found

    def dtype(self, name: str) -> torch.dtype:
        where = self.theirs[name]
        return self.stored[where.layer][0][where.key].dtype

    def rows(self, name: str) -> int | None:
        """How many rows of a table are not padding. None for a tensor that is never padded."""
        return self.shapes[name][0] if name in TABLES else None

    def _missing(self) -> list[str]:
        return [
            f"{label(where)} is missing"
            for where in self.theirs.values()
            if where.key not in self.stored[where.layer][0]
        ]

    def _surplus(self) -> list[str]:
        """Put every key into the report. Returns the keys that cannot be left out."""
        used = {(where.layer, where.key) for where in self.theirs.values()}
        problems = []
        for layer, ranks in self.stored.items():
            for key in ranks[0]:
                shown = label(PipelineTensor(layer, key))
                if (layer, key) in used:
                    self.report.mapped.append(shown)
                elif (why := why_ignored(key)) is not None:
                    self.report.unused[shown] = why
                else:
                    problems.append(f"{shown} is a tensor that such a model does not have")
        return problems

    def _misfit(self, name: str) -> str:
        where, wanted, axis = self.theirs[name], self.shapes[name], tp_axis(name)
        shapes = [list(rank[where.key].shape) for rank in self.stored[where.layer]]
        dtypes = dict.fromkeys(str(rank[where.key].dtype) for rank in self.stored[where.layer])
        if len(dtypes) > 1:
            return f"{label(where)} is stored as {' and '.join(dtypes)} by the tp ranks"
        whole = list(shapes[0])
        if len(whole) == len(wanted):
            if axis is not None:
                whole[axis] = sum(shape[axis] for shape in shapes)
            if where.half is not None:
                whole[0] //= 2
        padded = name in TABLES and whole[1:] == list(wanted[1:]) and whole[0] >= wanted[0]
        if (whole == list(wanted) or padded) and all(shape == shapes[0] for shape in shapes):
            return ""
        kind = (
            "different shapes"
            if any(shape != shapes[0] for shape in shapes)
            else f"shape {whole} over {len(shapes)} tp ranks"
        )
        return f"{label(where)} has {kind}, {name} is {list(wanted)}"


def label(where: PipelineTensor) -> str:
    """The name of a layer file's tensor in reports and errors."""
    return f"layer {where.layer} {where.key}"


def halved(piece: Tensor, where: PipelineTensor) -> Tensor:
    """The rows of a tp rank that are ours, where one tensor holds both matrices of a gated layer."""
    return piece if where.half is None else piece.chunk(2)[where.half]
