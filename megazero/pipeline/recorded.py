"""The work of one unit of a run (embedding, block, head), recorded from the unit itself on torch's meta device: its
products by shape, the bytes that all its other kernels move, how many kernels it launches, and its messages over tp.

The unit runs forward and backward there once, as in `pipeline.measured`, and a mode of dispatch sees every operation.
Kernels of `fused_ops` tell a witness (`fused_ops.native.stand_in`) what they are called with. So a kind of layer needs
no formula, and what is computed again in a backward is counted because it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fused_ops.native.library import choice
from fused_ops.native.stand_in import AttentionWork, standing_for, witnessed_by
from megazero.config.derive import NONE
from megazero.model.stage import Stage
from megazero.mpu.absent import absent_group
from megazero.pipeline.measured import (
    MeasuredCase,
    batch_of,
    built_unit,
    first_checkpoint,
    hidden_of,
    read_by_a_unit,
    taken,
)
from megazero.pipeline.schedule_run import GraphEntry
from megazero.pipeline.storages import Storages, run_backward
from megazero.system.collector import without_collections


class Product(NamedTuple):
    """Products [rows, depth] x [depth, columns], as many at once as `batch` says.

    share  the part of it that is computed: attention's kernels leave out keys that no query sees
    dtype  of the factors, as torch names it
    read   bytes of the factors
    made   bytes of the result; one that is added to counts twice
    """

    batch: int
    rows: int
    columns: int
    depth: int
    share: float
    dtype: str
    read: int
    made: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.depth * self.share


class Sent(NamedTuple):
    """A message over tp: its name, and its bytes by the convention of `Group.traffic`."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class PassWork:
    """The work of a forward or a backward of one micro-batch on one rank.

    products  each, and how often
    moved     bytes that all other kernels read and write
    kernels   number of kernels that the host launches, products among them and messages not
    messages  over tp, and how often each
    """

    products: Mapping[Product, int]
    moved: int
    kernels: int
    messages: Mapping[Sent, int]

    @property
    def flops(self) -> float:
        """Operations of its products."""
        return sum(number * product.flops for product, number in self.products.items())


@dataclass(frozen=True)
class UnitWork:
    """The work of a unit. What backward computes again is in `backward`."""

    forward: PassWork
    backward: PassWork


def recorded(case: MeasuredCase) -> UnitWork:
    """The work of a unit. Cases that compute the same are recorded once in a process."""
    return _recorded(replace(case, run=read_by_a_unit(case.run)), choice())


@cache
def _recorded(case: MeasuredCase, fused: str) -> UnitWork:
    """fused: what else of the process decides how a unit is computed."""
    if case.recompute != NONE:
        first_checkpoint()
    log = _Log()
    with ExitStack() as block:
        block.enter_context(without_collections())
        block.enter_context(standing_for(case.kind))
        block.enter_context(torch.enable_grad())
        stage = built_unit(case, absent_group(case.run.parallel.tp, log.sent))
        targets = list(taken(stage, []))
        for target in targets:
            target.late = None
        # what is made once and then kept is there from the second time on
        for _ in range(2):
            log.clear()
            with witnessed_by(log), _Kernels(log):
                forward, backward = _passed(case, stage, log)
        return UnitWork(forward, backward)


def _passed(case: MeasuredCase, stage: Stage, log: _Log) -> tuple[PassWork, PassWork]:
    """The work of a forward and of a backward."""
    hidden, entry, batch = None, GraphEntry(), batch_of(case.run)
    if not case.spec.has_embedding:
        hidden = hidden_of(case.run, stage)
        hidden = entry.enter(hidden) if case.graded else hidden
    log.clear()
    output = stage(hidden, batch, (0, 1))
    forward = log.work()
    gradient = torch.empty_like(output)
    log.clear()
    if output.requires_grad:
        run_backward(get_gradient_edge(output), gradient)
    entry.leave()
    return forward, log.work()


@dataclass
class _Log:
    """What has been seen since it was last cleared. It is the witness of kernels (`stand_in.Witness`)."""

    products: Counter[Product] = field(default_factory=Counter)
    messages: Counter[Sent] = field(default_factory=Counter)
    moved: int = 0
    kernels: int = 0

    def clear(self) -> None:
        self.products, self.messages, self.moved, self.kernels = Counter(), Counter(), 0, 0

    def work(self) -> PassWork:
        return PassWork(MappingProxyType(self.products), self.moved, self.kernels, MappingProxyType(self.messages))

    def sent(self, name: str, nbytes: int) -> None:
        self.messages[Sent(name, nbytes)] += 1

    def called(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A fused kernel reads or writes each of its tensors once, and those that it overwrites twice."""
        plain = name.rpartition("_")[0]
        if plain == "weight_gradient":
            grad, x, into = tensors
            self.multiplied(grad.t(), x, into, adds=True)
            return
        sizes = [tensor.nbytes for tensor in tensors]
        if plain in _SCATTERS:
            sizes[0] = 2 * tensors[-1].numel() * tensors[0].element_size()
        self.kernel(sum(sizes) + sum(sizes[: _OVERWRITTEN.get(plain, 0)]))

    def attended(self, work: AttentionWork) -> None:
        dtype = _name_of(work.dtype)
        self.products[Product(work.planes, work.length, work.length, work.size, work.seen, dtype, 0, 0)] += (
            work.products
        )
        self.kernel(work.moved)

    def multiplied(self, a: Tensor, b: Tensor, result: Tensor, *, adds: bool) -> None:
        read, made = a.nbytes + b.nbytes, result.nbytes * (1 + adds)
        batch = a.shape[0] if a.dim() == 3 else 1
        rows, depth = a.shape[-2:]
        self.products[Product(batch, rows, b.shape[-1], depth, 1.0, _name_of(a.dtype), read, made)] += 1
        self.kernels += 1

    def kernel(self, moved: int) -> None:
        self.moved += moved
        self.kernels += 1


_OVERWRITTEN: Mapping[str, int] = MappingProxyType({"softmax": 1, "softmax_backward": 1, "write_gradient": 1})
"""Kernels that read what they overwrite -> how many of their first tensors that is."""
_FACTORS: Mapping[str, int] = MappingProxyType(
    {
        "aten::mm": 0,
        "aten::bmm": 0,
        "aten::addmm": 1,
        "aten::addmm_": 1,
        "aten::baddbmm": 1,
        "aten::_scaled_mm": 0,
    }
)
"""Products of torch -> the place of their first factor; the second one follows."""
_ALLOCATIONS = frozenset(
    {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
)
_LOOKUPS = frozenset({"aten::embedding", "aten::index_select", "aten::gather"})
"""Operations that read of their first tensor no more than they make."""
_SCATTERS = frozenset({"embedding_gradient_sorted", "embedding_gradient_rounded", "embedding_gradient"})
"""Kernels that read and write of their first tensor no more than the rows of their last one."""


class _Kernels(Storages):
    """Writes the kernels behind operations into a log."""

    def __init__(self, log: _Log) -> None:
        super().__init__(None)
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name
        results = [each for each in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(each, Tensor)]
        if not results or name in _ALLOCATIONS:
            return made
        if name in _FACTORS:
            first = _FACTORS[name]
            summed = args[0] if first and (kwargs or {}).get("beta", 1) else None
            adds = summed is not None and summed.shape == results[0].shape
            self._log.multiplied(args[first], args[first + 1], results[0], adds=adds)
            return made
        given = [tensor for argument in args for tensor in _tensors(argument)]
        if not func._schema.is_mutable and _shares(results[0], given):
            return made  # a view
        read = given[1:] if name in _LOOKUPS else given
        written = sum(tensor.nbytes for tensor in results) * (1 + (name in _LOOKUPS))
        self._log.kernel(sum(tensor.nbytes for tensor in read) + written)
        return made


def _tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    return [each for each in argument if isinstance(each, Tensor)] if isinstance(argument, (list, tuple)) else []


def _shares(result: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether a result lies in the memory of a tensor that was given."""
    own = result.untyped_storage()._cdata
    return any(tensor.untyped_storage()._cdata == own for tensor in given)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]
