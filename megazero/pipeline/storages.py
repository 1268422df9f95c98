"""Bytes of the tensors that code makes, on torch's meta device or on one that computes: of those alive now, and the
most so far.

A mode of dispatch sees what every operation makes, and a weak reference to its storage when it is freed. So memory is
freed by the rules of autograd and Python themselves. Memory that an operation takes and gives back within itself is not
seen. Two things are otherwise under a mode, and stand here:

- Autograd adds a second gradient in place where nobody else has the first one, but never under a mode of dispatch. So
  the mode does it for autograd.
- Elementwise operations on the meta device are written in Python, and the first of them imports torch's compiler, which
  takes a second and 70 MB. So the mode makes their results.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

_ADD = torch.ops.aten.add.Tensor
_ENGINE = _engine_run_backward.__code__
"""The frame below an operation that the engine of autograd itself asks for."""
WITHIN: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {torch.ops.aten.embedding.default: lambda table, ids, *rest: 0 if ids.is_contiguous() else ids.nbytes}
)
"""Operations that take memory within themselves on their device and none on the meta device -> bytes of it."""

Owners = tuple[int, int, int]
"""Numbers of owners of a tensor, of its Python object, and of its memory."""


class Storages(TorchDispatchMode):
    """The storages that operations make within the block.

    alive  bytes of those that are alive now
    most   the largest `alive` since it was last set
    """

    def __init__(self, lone: Owners | None) -> None:
        """lone: `lone_owners()`; None: autograd adds nothing in place."""
        super().__init__()
        self.alive = self.most = self._within = 0
        self._lone = lone
        self._counted: dict[int, tuple[weakref.ref[Any], int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: what skips the compiler imports it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and _is_asked_by_autograd() and self._adds_in_place(args[0]):
            made = args[0]
        else:
            made = self.make(func, args, kwargs or {})
            within = WITHIN.get(func)
            self._within = 0 if within is None else within(*args)
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(tensor, Tensor):
                    self._meet(tensor, counts=True)
        self.note(func, args, kwargs or {}, made)
        return made

    def make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operation returns."""
        return _made(func, args, kwargs)

    def note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Is told of each operation, and what it has made: with a sum in place, its first summand."""

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these tensors from now on."""
        for tensor in tensors:
            self._meet(tensor, counts=False)

    def _adds_in_place(self, gradient: Tensor) -> bool:
        """Whether autograd, which asks for a sum, is the only owner of its first summand."""
        return gradient.nbytes == gradient.untyped_storage().nbytes() and owners(gradient) == self._lone

    def _meet(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counts else 0
        if key in self._counted:
            if counts:
                return
            self.alive -= self._counted.pop(key)[1]
        self._counted[key] = weakref.ref(storage, partial(self._freed, key)), size
        self.alive += size
        self.most = max(self.most, self.alive + self._within)

    def _freed(self, key: int, storage: Any) -> None:
        self.alive -= self._counted.pop(key)[1]


class ComputedStorages(Storages):
    """The same on a device that computes. Where autograd adds in place, the summand is left out of the sum: the numbers
    of gradients mean nothing.
    """

    def make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


def _is_asked_by_autograd() -> bool:
    """Whether the engine of autograd itself asks for the operation under way. On a GPU it does so in a thread of its
    own, below which there is no frame.
    """
    try:
        return sys._getframe(2).f_code is _ENGINE
    except ValueError:
        return True


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation on the meta device returns."""
    if func._schema.is_mutable and len(func._schema.returns) == 1:
        return kwargs.get("out", args[0])
    if (shaped := _SHAPES.get(func)) is not None:
        return shaped(*args, **kwargs)
    if torch.Tag.pointwise not in func.tags or "memory_format" in kwargs:  # a copy has an order of its own
        return func(*args, **kwargs)
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))  # torch's imports its compiler
    dtype = _dtype_of(func, _kinds(args), tuple(kwargs), _kinds(kwargs.values()), torch.get_default_dtype())
    like = next((tensor for tensor in tensors if tensor.shape == shape), None)
    return _empty(tensors[0], shape, dtype) if like is None else _like(like, dtype=dtype)


_Kind = tuple[Any, Any]
"""What of an argument decides a dtype: of a tensor its dtype and whether it has dimensions; else its type and itself.
"""


def _kinds(arguments: Iterable[Any]) -> tuple[_Kind, ...]:
    return tuple((a.dtype, a.dim() > 0) if isinstance(a, Tensor) else (type(a), a) for a in arguments)


@lru_cache(maxsize=1024)  # a unit has few operations, on many tensors
def _dtype_of(
    func: Any, kinds: Sequence[_Kind], names: Sequence[str], named: Sequence[_Kind], default: torch.dtype
) -> torch.dtype:
    """The dtype that an elementwise operation makes: the same operation on single numbers knows it. names, named: of
    arguments by name. default: torch's own.
    """

    def small(kind: Any, rest: Any) -> Any:
        return torch.ones((1,) * rest, dtype=kind) if isinstance(kind, torch.dtype) else rest

    made: Tensor = func(
        *(small(*each) for each in kinds), **{n: small(*each) for n, each in zip(names, named, strict=True)}
    )
    return made.dtype


def _empty(like: Tensor, size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """`like.new_empty`, which takes ten times as long on the meta device: there it is written in Python."""
    return torch.empty(size, dtype=dtype or like.dtype, device=like.device)


def _like(
    x: Tensor, *, dtype: torch.dtype | None = None, memory_format: Any = torch.preserve_format, **rest: Any
) -> Tensor:
    """A tensor of the shape of x, and without a format in its order of memory, without gaps."""
    if x.is_contiguous() or 0 in x.stride() or memory_format is torch.contiguous_format:
        return _empty(x, x.shape, dtype)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return _empty(x, [x.shape[i] for i in order], dtype).permute(back)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _empty(a, (*a.shape[:-1], b.shape[-1]))


def _numbers(*bounds: int, dtype: torch.dtype | None = None, device: torch.device, **rest: Any) -> Tensor:
    return torch.empty(len(range(*bounds)), dtype=dtype or torch.int64, device=device)


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _empty(tensors[0], shape)


_SHAPES: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {
        torch.ops.aten.mm.default: _product,
        torch.ops.aten.bmm.default: _product,
        torch.ops.aten.addmm.default: lambda summand, a, b, **factors: _product(a, b),
        torch.ops.aten.baddbmm.default: lambda summand, a, b, **factors: _product(a, b),
        torch.ops.aten.embedding.default: lambda table, ids, *rest: _empty(table, (*ids.shape, table.shape[1])),
        torch.ops.aten.arange.default: _numbers,
        torch.ops.aten.arange.start: _numbers,
        torch.ops.aten.arange.start_step: _numbers,
        torch.ops.aten.cat.default: _joined,
        torch.ops.aten.new_empty.default: lambda x, size, *, dtype=None, **rest: _empty(x, size, dtype),
        torch.ops.aten.empty_like.default: _like,
        torch.ops.aten.ones_like.default: _like,
        torch.ops.aten.zeros_like.default: _like,
    }
)


def run_backward(edge: GradientEdge, gradient: Tensor) -> None:
    """torch.autograd.backward from this place of a graph, which would import a part of torch's compiler."""
    run: Any = _engine_run_backward
    run((edge,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def owners(gradient: Tensor) -> Owners:
    """The numbers of owners of a tensor."""
    of_tensor: Any = gradient._use_count  # type: ignore[attr-defined]
    of_memory: Any = torch._C._storage_Use_Count
    return of_tensor(), sys.getrefcount(gradient), of_memory(gradient.untyped_storage()._cdata)


def lone_owners() -> Owners:
    """The `owners` of a first summand that autograd alone has: what this torch says of one.

    It is asked for each measurement, in the state of the process in which that runs.
    """
    counts: list[Owners] = []

    class Seen(Storages):
        def _adds_in_place(self, gradient: Tensor) -> bool:
            counts.append(owners(gradient))
            return False

    factor = torch.empty(2, 2, device="meta")
    x = torch.empty(2, 2, device="meta", requires_grad=True)
    with torch.enable_grad(), Seen(None):
        for _ in range(2):  # what the first use of an operation leaves in cycles may own the first summand too
            y = x @ factor
            run_backward(get_gradient_edge(y @ factor + y @ factor), torch.empty_like(factor))
    _, lone = counts
    return lone
