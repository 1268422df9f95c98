"""A checkpoint of low-rank adapters as a model: the base model's weights with the adapters added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fused_ops.blocks import opmath_dtype, rows_of
from megazero.checkpoint.narrowing import OutOfRange, require_range
from megazero.checkpoint.window import TensorInfo
from megazero.config.derive import lora_scale
from megazero.config.schema import LoraConfig
from megazero.convert.source import WEIGHT, ConversionError, Source

FACTORS = _A, _B = "lora_a", "lora_b"
"""Last parts of the names of A [r, in] and B [out, r]."""


class AdaptedSource(Source):
    """W + scale B A, in W's dtype, where a layer has an adapter. All other tensors are the base model's.

    adapters  the checkpoint of adapters; its entries are the adapters
    base      the model that they belong to; if that has adapters of its own, they are merged already
    """

    def __init__(self, adapters: Source, base: Source) -> None:
        run = replace(adapters.run, lora=LoraConfig())
        entries = {
            name: TensorInfo(entry.shape, {WEIGHT: entry.columns[WEIGHT]}) for name, entry in base.entries.items()
        }
        companions = {**base.companions, **adapters.companions}
        super().__init__(adapters.format, adapters.path, run, entries, adapters.position, companions, base.report)
        self.adapters, self.base = adapters, base
        self.closing.push(adapters.__exit__)
        self.closing.push(base.__exit__)
        self._adapted = {weight_of(name) for name in adapters.entries}
        self.report.notes.append(
            f"{len(self._adapted)} matrices of {base.path} with the adapters of {adapters.path} added"
        )

    @property
    def separates_qkv(self) -> bool:
        return self.base.separates_qkv

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        return self.with_adapters(name, self.base.read(name, column))

    def with_adapters(self, name: str, weight: Tensor) -> Tensor:
        """The base model's weight of that name with its adapters added, in the weight's dtype."""
        if name not in self._adapted:
            return weight
        layer = name.removesuffix("weight")
        a, b = self.adapters.read(layer + _A), self.adapters.read(layer + _B)
        try:
            return merge_adapter(weight, a, b, lora_scale(self.adapters.run.lora), name)
        except OutOfRange as error:
            raise ConversionError(
                f"{self.base.path} with the adapters of {self.path}: {error.nearest('a base in')}"
            ) from error


class Unrounded(Source):
    """The model of an `AdaptedSource` whose sums are not rounded to 16 bits. PEFT multiplies a weight and its adapters
    apart, so that it has no such sums either.
    """

    def __init__(self, both: AdaptedSource) -> None:
        entries = {
            name: TensorInfo(entry.shape, {WEIGHT: torch.promote_types(entry.columns[WEIGHT], torch.float32)})
            for name, entry in both.entries.items()
        }
        super().__init__(both.format, both.path, both.run, entries, both.position, both.companions, both.report)
        self._both = both

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        weight = self._both.base.read(name, column)
        return self._both.with_adapters(name, weight.to(self.entries[name].columns[WEIGHT]))


class AdaptersAlone(Source):
    """The adapters of an `AdaptedSource`, not merged and without moments. `base` is the model that they belong to."""

    def __init__(self, both: AdaptedSource) -> None:
        under = both.adapters
        entries = {
            name: TensorInfo(entry.shape, {WEIGHT: entry.columns[WEIGHT]}) for name, entry in under.entries.items()
        }
        super().__init__(both.format, both.path, under.run, entries, both.position, both.companions, both.report)
        self.base, self._under = both.base, under

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        return self._under.read(name, column)


class UnboundAdapters(Source):
    """Adapters under another program's names. Their names of ours depend on the model."""

    def on(self, base: Source) -> Source:
        """The adapters of this model under our names. Raises ConversionError where they do not belong to it."""
        raise NotImplementedError


def weight_of(name: str) -> str:
    """The weight that a factor of an adapter belongs to: "blocks.3.mlp.up.lora_a" -> "blocks.3.mlp.up.weight"."""
    layer, _, factor = name.rpartition(".")
    assert factor in (_A, _B), name
    return f"{layer}.weight"


@torch.no_grad()
def merge_adapter(weight: Tensor, a: Tensor, b: Tensor, factor: float, name: str) -> Tensor:
    """weight + factor b a, rounded once to weight's dtype: [out, in], [r, in], [out, r]. Sums are in fp32, or in fp64
    where anything is fp64. Raises OutOfRange for a sum that weight's dtype does not hold. name: of the weight.

    It works on blocks of rows, so that it takes little more memory than a copy of the weight.
    """
    dtype = torch.promote_types(torch.promote_types(opmath_dtype(weight.dtype), a.dtype), b.dtype)
    out, a = torch.empty_like(weight, memory_format=torch.contiguous_format), a.to(dtype)
    block = rows_of(weight, weight.shape[1])
    for start in range(0, weight.shape[0], block):
        rows = slice(start, start + block)
        merged = torch.addmm(weight[rows].to(dtype), b[rows].to(dtype), a, alpha=factor)
        out[rows] = require_range(merged, weight.dtype, name)
    return out


def adapted_source(adapters: Source, where: Path | None, open_base: Callable[[Path], Source]) -> AdaptedSource:
    """The model of a checkpoint of adapters. where: the base model, if it is known.

    Raises ConversionError where the base model is not there, or is a different model.
    """
    if where is None:
        raise ConversionError(f"{adapters.path} holds adapters, and does not say of which model")
    if not where.exists():
        raise ConversionError(f"{adapters.path} holds adapters of the model in {where}, which is not there")
    base = open_base(where)
    if isinstance(adapters, UnboundAdapters):
        adapters = adapters.on(base)
    names = sorted(weight_of(name) for name in adapters.entries)
    unknown = [name for name in names if name not in base.entries]
    unknown += [name for name in names if name in base.entries and base.entries[name].shape != _shape(adapters, name)]
    if unknown:
        raise ConversionError(
            f"{adapters.path} holds adapters of {', '.join(unknown[:20])}, which the model in {where} does not have"
        )
    return AdaptedSource(adapters, base)


def _shape(adapters: Source, name: str) -> tuple[int, int]:
    """The shape of the weight that a pair of factors adds to."""
    layer = name.removesuffix("weight")
    return adapters.entries[layer + _B].shape[0], adapters.entries[layer + _A].shape[1]
