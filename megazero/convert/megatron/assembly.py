"""Global tensors of ours from what Megatron's tensor-parallel ranks hold under their own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.config.inventory import TABLES, WORDS, tp_axis
from megazero.config.schema import ModelConfig
from megazero.convert.megatron.names import TIED_COPIES, MegatronTensor, theirs, why_ignored
from megazero.convert.report import ConversionReport
from megazero.convert.shards import join_shards, reconcile_replicas
from megazero.convert.source import ConversionError, parameter_specs

Ranks = Sequence[Mapping[str, Tensor]]
"""For each tp rank its tensors by their names, layers counted over the whole model."""


@dataclass(frozen=True)
class TensorKey:
    """Where one of our tensors is: a key, the half of its rows that is ours, and the key of a tied copy on the last
    stage, if any.
    """

    key: str
    half: int | None
    copy: str | None = None


class Assembly:
    """The tensors of a model among those of a checkpoint. Nothing is read before `tensor` is called.

    Raises ConversionError that lists every name that is missing, every tensor that the model does not have, and every
    shape that differs.
    """

    def __init__(
        self, where: str, model: ModelConfig, ranks: Ranks, report: ConversionReport, *, qkv_bias_alone: bool = False
    ) -> None:
        self.where, self.model, self.ranks, self.report = where, model, ranks, report
        self.specs = parameter_specs(model)
        wanted = theirs(model)
        self.found = {name: found for name, named in wanted.items() if (found := self._find(name, named)) is not None}
        zeros = [
            name
            for name in wanted
            if qkv_bias_alone and name.endswith("attention.output.bias") and name not in self.found
        ]
        report.filled |= dict.fromkeys(zeros, "zeros: only query, key and value have a bias there")
        problems = [
            f"{name} is missing (looked for {', '.join(wanted[name].names[:3])})"
            for name in wanted
            if name not in (*self.found, *zeros)
        ]
        problems += self._account()
        problems += [problem for name in self.found for problem in self._misfits(name)]
        if problems:
            shown = [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
            raise ConversionError(f"{where} does not hold the model that its arguments describe: " + "; ".join(shown))

    def tensor(self, name: str, ranks: Ranks | None = None) -> Tensor:
        """One of our global tensors, without vocabulary padding. ranks: other values under the same keys (moments)."""
        values = self.ranks if ranks is None else ranks
        if name not in self.found:
            return torch.zeros(self.specs[name].shape, dtype=self.dtype(name, ranks))
        found = self.found[name]
        pieces = [self._piece(rank, found, str(index)) for index, rank in enumerate(values)]
        rows = self.specs[name].shape[0] if name in TABLES else None
        return join_shards(found.key, pieces, tp_axis(name), self.report, rows)

    def dtype(self, name: str, ranks: Ranks | None = None) -> torch.dtype:
        """The dtype in which the tensor is stored."""
        stands_for = name if name in self.found else name.replace("output.bias", "qkv.bias")
        return (self.ranks if ranks is None else ranks)[0][self.found[stands_for].key].dtype

    def _piece(self, rank: Mapping[str, Tensor], found: TensorKey, index: str) -> Tensor:
        piece = rank[found.key]
        if found.half is not None:
            piece = piece.chunk(2)[found.half]
        if found.copy is None or found.copy not in rank:
            return piece
        return reconcile_replicas(
            f"{found.key} and {found.copy} (tp rank {index})", [piece, rank[found.copy]], self.report
        )

    def _find(self, name: str, named: MegatronTensor) -> TensorKey | None:
        key = next((key for key in named.names if all(key in rank for rank in self.ranks)), None)
        if key is None:
            return None
        tied = name == WORDS and not self.model.untie_embeddings_and_output_weights
        copies = [copy for copy in TIED_COPIES if tied and all(copy in rank for rank in self.ranks)]
        return TensorKey(key, named.half, copies[0] if copies else None)

    def _account(self) -> Iterator[str]:
        """Put every key of the checkpoint into the report. Yields the keys that cannot be left out."""
        used = {key: name for name, found in self.found.items() for key in (found.key, found.copy) if key is not None}
        for key in dict.fromkeys(key for rank in self.ranks for key in rank):
            if key in used:
                self.report.mapped.append(key)
            elif (why := why_ignored(key)) is not None:
                self.report.unused[key] = why
            else:
                yield f"{key} is a weight that a model with these arguments does not have"

    def _misfits(self, name: str) -> Iterator[str]:
        found, axis, wanted = self.found[name], tp_axis(name), self.specs[name].shape
        for key in (found.key, found.copy):
            if key is None:
                continue
            shapes = [list(rank[key].shape) for rank in self.ranks]
            whole = list(shapes[0])
            if axis is not None and len(whole) > axis:
                whole[axis] = sum(shape[axis] for shape in shapes if len(shape) > axis)
            if found.half is not None:
                whole[0] //= 2
            padded = name in TABLES and whole[1:] == list(wanted[1:]) and whole[0] >= wanted[0]
            if whole != list(wanted) and not padded:
                yield f"{key} has shape {whole} over {len(shapes)} tensor-parallel ranks, {name} is {list(wanted)}"
