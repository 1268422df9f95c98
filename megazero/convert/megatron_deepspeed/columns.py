"""Global tensors of the optimizer's columns, joined from dp partitions, tp ranks and pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megazero.config.inventory import WORDS, tp_axis
from megazero.convert.megatron_deepspeed.folders import Files, Listing
from megazero.convert.megatron_deepspeed.names import PipelineTensor
from megazero.convert.megatron_deepspeed.weights import Weights, halved, label
from megazero.convert.megatron_deepspeed.zero import PartitionSlice, ZeroContents, pieces_of
from megazero.convert.report import ConversionReport
from megazero.convert.shards import join_shards, reconcile_replicas
from megazero.convert.source import ConversionError

Held = Mapping[tuple[int, str], tuple[int, list[PartitionSlice]]]
"""For one tp rank: (layer, key) -> (model-parallel rank whose files hold the parameter, its slices)."""


class Columns:
    """Masters and moments. Raises ConversionError that lists every parameter of the layer files that the optimizer's
    files do not hold completely.
    """

    def __init__(
        self, files: Files, listing: Listing, weights: Weights, zero: ZeroContents, report: ConversionReport
    ) -> None:
        self.files, self.listing, self.weights, self.zero, self.report = files, listing, weights, zero, report
        self.tp = listing.tp
        self.stages = len(zero.slices) // self.tp
        self.held: list[Held] = [self._held(t) for t in range(self.tp)]
        problems = [problem for where in dict.fromkeys(weights.theirs.values()) for problem in self._problems(where)]
        if problems:
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise ConversionError(
                f"{listing.folder}: the optimizer's files do not hold what the layer files do: "
                f"{'; '.join(problems[:20] + more)}. "
                f"To convert the weights alone, move the *_optim_states.pt files elsewhere"
            )
        for column in zero.dtypes:
            report.mapped += [f"{label(where)} {column}" for where in dict.fromkeys(weights.theirs.values())]
        self._account()

    def read(self, name: str, column: str) -> Tensor:
        """A global tensor of one column, without vocabulary padding.

        Memory: the tensor, and twice that where its columns are split.
        """
        where, axis = self.weights.theirs[name], tp_axis(name)
        key = f"{label(where)} {column}"
        if axis == 0 and where.half is None:
            slices = [
                piece for t in range(self.tp) for piece in self._slices(*self.held[t][where.layer, where.key], column)
            ]
            flat = slices[0] if len(slices) == 1 else torch.cat(slices)
            whole = self._like_copies(
                name, where, column, flat.view(-1, *self.weights.stored[where.layer][0][where.key].shape[1:])
            )
            rows = self.weights.rows(name)
            return whole if rows is None else whole[:rows]
        pieces = [halved(self._of_rank(t, where, column), where) for t in range(self.tp)]
        return join_shards(key, pieces, axis, self.report, self.weights.rows(name))

    def _slices(self, rank: int, parts: Sequence[PartitionSlice], column: str) -> list[Tensor]:
        return pieces_of(self.files, self.listing, rank, parts, column)

    def _of_rank(self, t: int, where: PipelineTensor, column: str) -> Tensor:
        pieces = self._slices(*self.held[t][where.layer, where.key], column)
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return flat.view(self.weights.stored[where.layer][t][where.key].shape)

    def _like_copies(self, name: str, where: PipelineTensor, column: str, whole: Tensor) -> Tensor:
        """The table, where the copies of all stages are equal, compared slice by slice; otherwise their mean."""
        others = []
        for copy in self._copies(name, where):
            slices = [piece for rank, parts in copy for piece in self._slices(rank, parts, column)]
            ends = list(accumulate((piece.numel() for piece in slices), initial=0))
            if not all(
                torch.equal(piece, whole.view(-1)[a:b]) for piece, a, b in zip(slices, ends[:-1], ends[1:], strict=True)
            ):
                others.append(torch.cat(slices).view_as(whole))
        return (
            reconcile_replicas(f"{label(where)} {column} (first and last stage)", [whole, *others], self.report)
            if others
            else whole
        )

    def _held(self, t: int) -> Held:
        """Where each parameter is. One of the tied embedding is in the first and in the last stage; the first stage's
        is used.
        """
        found: dict[tuple[int, str], tuple[int, list[PartitionSlice]]] = {}
        for stage in reversed(range(self.stages)):
            rank = stage * self.tp + t
            for parameter, parts in self.zero.slices[rank].items():
                place = self.weights.layers.place(parameter)
                if place is not None:
                    found[place] = rank, parts
        return found

    def _copies(self, name: str, where: PipelineTensor) -> list[list[tuple[int, list[PartitionSlice]]]]:
        """The copies of the tied table on other stages. They are trained, unlike the rest of a tied embedding there."""
        if name != WORDS or not self.weights.layers.tied:
            return []
        parameter = self.weights.layers.parameter(where.layer, where.key)
        first = self.held[0][where.layer, where.key][0] // self.tp
        others = [
            stage for stage in range(self.stages) if stage != first and parameter in self.zero.slices[stage * self.tp]
        ]
        return [
            [(s * self.tp + t, self.zero.slices[s * self.tp + t][parameter]) for t in range(self.tp)] for s in others
        ]

    def _problems(self, where: PipelineTensor) -> list[str]:
        counts = []
        for t in range(self.tp):
            _, parts = self.held[t].get((where.layer, where.key), (0, []))
            counts.append(sum(part.numel for part in parts))
        wanted = [math.prod(self.weights.stored[where.layer][t][where.key].shape) for t in range(self.tp)]
        if counts == wanted:
            return []
        return [f"{label(where)} has {sum(wanted)} elements there and {sum(counts)} here"]

    def _account(self) -> None:
        """Report the parameters of the optimizer's files that were not used."""
        used = {(where.layer, where.key) for where in self.weights.theirs.values()}
        for rank, slices in enumerate(self.zero.slices):
            for parameter in slices:
                place = self.weights.layers.place(parameter)
                if place not in used:
                    self.report.unused[f"optimizer {parameter}"] = "no tensor of the layer files goes by this name"
                elif (
                    place is not None
                    and rank // self.tp != self.held[rank % self.tp][place][0] // self.tp
                    and not parameter.endswith("word_embeddings.weight")
                ):
                    self.report.unused[f"optimizer {parameter} (stage {rank // self.tp})"] = (
                        "an idle copy: only the first stage trains it"
                    )
