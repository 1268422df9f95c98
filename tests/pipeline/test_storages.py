"""What `pipeline.storages` counts on the meta device, beside what torch's profiler sees on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megazero.pipeline.storages import Storages, lone_owners, run_backward
from tests.plan.meter import Bytes, metered


class Two(torch.autograd.Function):
    """Two inputs, whose gradient is one tensor, or two halves of one."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, halves: bool) -> Tensor:
        ctx.halves = halves
        return a.new_empty(a.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if not ctx.halves:
            both = torch.empty_like(grads[0])
            return both, both, None
        parts = grads[0].new_empty(2, *grads[0].shape)
        return parts[0], parts[1], None


class Kept(torch.autograd.Function):
    """The identity, whose gradient somebody keeps."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.kept = kept
        return a.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        made = grads[0].clone()
        ctx.kept.append(made)
        return made, None


def two(a: Tensor, b: Tensor, *, halves: bool = False) -> Tensor:
    made: Tensor = Two.apply(a, b, halves)
    return made


def kept(a: Tensor, by: list[Tensor]) -> Tensor:
    made: Tensor = Kept.apply(a, by)
    return made


GRAPHS: dict[str, Callable[[Tensor, Tensor, list[Tensor]], Tensor]] = {
    "products": lambda x, w, by: two(x @ w, x @ w),
    "one after the other": lambda x, w, by: two(x @ w, two(x @ w, x @ w)),
    "of one tensor": lambda x, w, by: two(x, x),
    "residual": lambda x, w, by: two(x, x @ w),
    "views": lambda x, w, by: two(x, x, halves=True),
    "kept first": lambda x, w, by: two(x @ w, kept(x, by)),
    "kept last": lambda x, w, by: two(kept(x, by), x @ w),
    "passed on": lambda x, w, by: x + x @ w,
    "elementwise": lambda x, w, by: (x.exp() * 2 + x).clamp(min=0),
    "joined": lambda x, w, by: torch.cat([x.t(), (x @ w).t()], dim=1).t()[: x.shape[0]].contiguous(),
}


def backward_on(device: str, graph: Callable[[Tensor, Tensor, list[Tensor]], Tensor]) -> Bytes:
    """What a graph's backward leaves, and takes at most. Of the input somebody has no gradient."""
    leaf, w = torch.ones(64, 64, device=device, requires_grad=True), torch.ones(64, 64, device=device)
    by: list[Tensor] = []

    def run() -> tuple[Any, Tensor]:
        made = graph(leaf.clone(), w, by)
        return get_gradient_edge(made), torch.ones_like(made)

    leaf.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    if device == "cpu":
        (edge, gradient), _ = metered(run)  # the profiler knows sizes of what it has seen allocated
        return metered(lambda: torch.autograd.backward([edge], [gradient]))[1]
    with Storages(lone_owners()) as storages:
        storages.leave_out([leaf, w])
        edge, gradient = run()
        storages.most = before = storages.alive
        run_backward(edge, gradient)
        return Bytes(storages.alive - before, storages.most - before)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_backward_takes_what_it_does_on_a_cpu(name: str) -> None:
    real, counted = (backward_on(device, GRAPHS[name]) for device in ("cpu", "meta"))
    assert real.peak >= 64 * 64 * 4
    numbers = 32 * (name == "elementwise")  # factors that autograd keeps in host memory
    assert abs(counted.left - real.left) <= numbers and abs(counted.peak - real.peak) <= numbers


def test_bytes_alive_and_the_most() -> None:
    with Storages(None) as storages:
        a = torch.empty(3, 5, device="meta")
        b = a.t()
        c = torch.empty(7, dtype=torch.int64, device="meta")
        assert (storages.alive, storages.most) == (60 + 56, 60 + 56)
        del a
        assert storages.alive == 60 + 56, "a view holds it"
        del b, c
        assert (storages.alive, storages.most) == (0, 60 + 56)
        given = torch.empty(9, device="meta")
        storages.leave_out([given])
        assert storages.alive == 0
        assert given.view(3, 3).sum().nbytes == 4 and storages.most == 60 + 56


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x + y,
    "row": lambda x, y: x * y[0],
    "column": lambda x, y: y[:, :1] - x,
    "comparison": lambda x, y: x < y,
    "number": lambda x, y: 2.5 * x,
    "integer": lambda x, y: torch.ones(3, dtype=torch.int64, device=x.device) / 2,
    "wider": lambda x, y: x.double() * x,
    "transposed": lambda x, y: x.t() * 2,
    "spread": lambda x, y: x[:1].expand(3, 5) + 1,
    "where": lambda x, y: torch.where(x > 0, x, 0.0),
    "in place": lambda x, y: x.clone().mul_(y),
    "filled": lambda x, y: x.masked_fill(y > 0, 1.0),
    "product": lambda x, y: x.t() @ y,
    "batch": lambda x, y: torch.baddbmm(x[None, :1, :1], x[None], y.t()[None], beta=0.0, alpha=2.0),
    "like": lambda x, y: torch.empty_like(x.t(), dtype=torch.float64),
    "numbers": lambda x, y: torch.arange(2, 11, 3, device=x.device),
    "stack": lambda x, y: torch.cat([x, y], -1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_results_are_those_of_the_device(name: str) -> None:
    """Shape, order of memory and dtype of what the mode makes itself."""
    real = ELEMENTWISE[name](torch.ones(3, 5), torch.ones(3, 5))
    with Storages(None):
        made = ELEMENTWISE[name](torch.ones(3, 5, device="meta"), torch.ones(3, 5, device="meta"))
    assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)
    assert made.is_meta


def dtypes_of_sums(device: str) -> list[torch.dtype]:
    """Of sums whose summands are equal, and of several types."""
    numbers = 1, 1.0, True, torch.ones((), device=device)
    known = [torch.ones(size, dtype=dtype, device=device) for size in ((2,), ()) for dtype in (torch.int64, torch.half)]
    return [(one + number).dtype for one in known for number in numbers]


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_the_dtype_of_an_operation_is_that_of_its_own_arguments(default: torch.dtype) -> None:
    """What the mode knows of an operation is of these types of numbers alone."""
    before = torch.get_default_dtype()
    for now in (before, default):
        torch.set_default_dtype(now)
        try:
            with Storages(None):
                made = dtypes_of_sums("meta")
            assert made == dtypes_of_sums("cpu")
        finally:
            torch.set_default_dtype(before)
