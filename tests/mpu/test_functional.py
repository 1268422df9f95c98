"""Row 22 of the numerical faults: every function that communicates, against finite differences in fp64.

The loss is one number for the whole group: a weighted sum of the outputs, where a replicated output counts once. A
replicated input is moved on all ranks at once, any other on one rank at a time.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megazero.mpu.axes import Axes
from megazero.mpu.collectives import all_reduce
from megazero.mpu.cross_entropy import vocab_parallel_cross_entropy
from megazero.mpu.functional import copy_to_tp, gather_last, gather_sequence, reduce_from_tp, reduce_scatter_sequence
from megazero.mpu.grid import Group, build_grid
from megazero.mpu.linear import column_parallel_linear, column_parallel_linear_pair
from tests.ranks import run_ranks


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def product(sequence_parallel: bool) -> Callable[[Tensor, Group], Tensor]:
    def function(x: Tensor, group: Group) -> Tensor:
        weight, bias = drawn(3, 2, seed=50 + group.index), drawn(3, seed=60 + group.index)
        return column_parallel_linear(x, weight, bias, group, sequence_parallel)

    return function


def weight_product(weight: Tensor, group: Group) -> Tensor:
    """A function of the weight [3, 2], which is this rank's own; x [2t, 1, 2] is gathered from parts."""
    x = drawn(2, 1, 2, seed=50 + group.index)
    return column_parallel_linear(x, weight, None, group, True)


def pair(x: Tensor, group: Group) -> Tensor:
    both = drawn(5, 2, seed=50 + group.index)
    first, second = column_parallel_linear_pair(x, (both[:2], both[2:]), (None, None), group, False)
    return torch.cat([first.sin(), second.cos()], -1)


def cross_entropy(x: Tensor, group: Group) -> Tensor:
    labels = torch.arange(x.shape[0]) * 2 % (3 * group.size - 1)
    return vocab_parallel_cross_entropy(
        x * 1.0, labels, group, vocab=3 * group.size - 1, label_smoothing=0.1, z_loss=0.01
    )


FUNCTIONS = {
    # name: function, local input shape for t ranks, input replicated, output replicated
    "copy_to_tp": (copy_to_tp, lambda t: (3, 2), True, False),
    "reduce_from_tp": (reduce_from_tp, lambda t: (3, 2), False, True),
    "gather_sequence": (gather_sequence, lambda t: (2, 1, 2), False, False),
    "reduce_scatter_sequence": (reduce_scatter_sequence, lambda t: (2 * t, 1, 2), False, False),
    "gather_last": (gather_last, lambda t: (2, 2, 3), False, True),
    "column product": (product(False), lambda t: (3, 2, 2), True, False),
    "column product, sequence parallel": (product(True), lambda t: (2, 1, 2), False, False),
    "column product's weight": (weight_product, lambda t: (3, 2), False, False),
    "pair of column products": (pair, lambda t: (2, 1, 2), True, False),
    "cross-entropy": (cross_entropy, lambda t: (3, 3), False, True),
}


def gradient_errors(rank: int, size: int) -> list[float]:
    group = build_grid(Axes(tp=size)).tp
    return [gradient_error(rank, size, group, name) for name in FUNCTIONS]


def gradient_error(rank: int, size: int, group: Group, name: str) -> float:
    """Largest difference between autograd's gradient of the local input and central differences."""
    function, shape_of, replicated_input, replicated_output = FUNCTIONS[name]
    shape = shape_of(size)
    x = drawn(*shape, seed=1 if replicated_input else 1 + rank)

    def loss(x: Tensor) -> Tensor:
        y = function(x, group).sin()
        return (y * drawn(*y.shape, seed=100 if replicated_output else 100 + rank)).sum()

    def whole_loss(x: Tensor) -> float:
        total = loss(x).clone()
        all_reduce(total, group).wait()
        return total.item() / (size if replicated_output else 1)

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    worst = 0.0
    for mover in range(1 if replicated_input else size):
        for i in range(x.numel()):
            step = torch.zeros(x.numel(), dtype=torch.float64)
            step[i] = 1e-5 if replicated_input or mover == rank else 0.0
            slope = (whole_loss(x + step.view(shape)) - whole_loss(x - step.view(shape))) / 2e-5
            if replicated_input or mover == rank:
                worst = max(worst, abs(slope - leaf.grad.view(-1)[i].item()))
    return worst


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fault_22_gradients_equal_finite_differences(size):
    for errors in run_ranks(size, gradient_errors, size):
        assert max(errors) < 1e-8, dict(zip(FUNCTIONS, errors, strict=True))


def adjoint_of_adjoint(rank: int, group: Group) -> bool:
    """The backward's own backward is the forward again."""
    x = drawn(2, 3, seed=rank).requires_grad_()
    w = drawn(4, 3, seed=10 + rank).requires_grad_()
    (grad,) = torch.autograd.grad((gather_sequence(x, group) * w).sum(), x, create_graph=True)
    seed = drawn(2, 3, seed=20 + rank)
    (found,) = torch.autograd.grad((grad * seed).sum(), w)
    return torch.equal(found, gather_sequence(seed, group))


def strided(rank: int, group: Group) -> bool:
    """Inputs and gradients that are not contiguous."""
    x = drawn(3, 4, seed=rank).t().requires_grad_()
    good = True
    for function in (copy_to_tp, reduce_from_tp, gather_sequence, reduce_scatter_sequence, gather_last):
        y, dense = function(x, group), function(x.detach().contiguous().requires_grad_(), group)
        w = drawn(*reversed(y.shape), seed=5).permute(*reversed(range(y.dim())))
        good &= torch.equal(y, dense)
        (grad,) = torch.autograd.grad((y * w).sum(), x)
        good &= grad.shape == x.shape
    return good


def of_two(rank: int) -> tuple[bool, bool]:
    group = build_grid(Axes(tp=2)).tp
    with pytest.raises(ValueError, match=r"3.*tp=2"):
        reduce_scatter_sequence(torch.zeros(3, 2), group)
    return adjoint_of_adjoint(rank, group), strided(rank, group)


def test_second_derivatives_strided_tensors_and_what_does_not_divide():
    assert run_ranks(2, of_two) == [(True, True)] * 2
