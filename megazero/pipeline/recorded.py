"""The work of one unit of a run (embedding, block, head), recorded from the unit itself on torch's meta device: its
products by shape, the bytes that all its other kernels move, how many kernels it launches, and its messages over tp.

While the unit runs forward and backward there (`pipeline.measured`), a mode of dispatch sees every operation. Kernels
of `fused_ops` tell a witness (`fused_ops.native.stand_in`) what they are called with. So a kind of layer needs no
formula, and what is computed again in a backward is counted because it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_ops.native.stand_in import AttentionWork
from megazero.pipeline.storages import Owners, Storages


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


@dataclass
class KernelLog:
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


class KernelMode(Storages):
    """Writes the kernels behind operations into a log."""

    def __init__(self, lone: Owners | None, log: KernelLog) -> None:
        """lone: as of `Storages`."""
        super().__init__(lone)
        self._log = log

    def note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        name = func._schema.name
        results = [each for each in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(each, Tensor)]
        if not results or name in _ALLOCATIONS:
            return
        if name in _FACTORS:
            first = _FACTORS[name]
            summed = args[0] if first and kwargs.get("beta", 1) else None
            adds = summed is not None and summed.shape == results[0].shape
            self._log.multiplied(args[first], args[first + 1], results[0], adds=adds)
            return
        given = [tensor for argument in args for tensor in _tensors(argument)]
        overwrites = func._schema.is_mutable or made is args[0]
        if not overwrites and _shares(results[0], given):
            return  # a view
        read = given[1:] if name in _LOOKUPS else given
        written = sum(tensor.nbytes for tensor in results) * (1 + (name in _LOOKUPS))
        self._log.kernel(sum(tensor.nbytes for tensor in read) + written)


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
