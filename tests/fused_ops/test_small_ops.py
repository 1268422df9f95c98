"""Norms, activations, rotary positions, embedding and the sum of squares against torch's own in fp64."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.activation import ACTIVATIONS, gelu_tanh
from fused_ops.embedding import embedding
from fused_ops.gated import GATED, gated, swiglu
from fused_ops.layernorm import layer_norm, rms_norm
from fused_ops.norm import sum_of_squares
from fused_ops.registry import MATRIX_OPS, OPS, describe
from fused_ops.rotary import apply_rotary, rotary_tables
from megazero.config.rotary import RotarySettings
from tests.fused_ops.levels import drawn

SIXTEEN = [torch.bfloat16, torch.float16]


def gradients(function, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Output and input gradients of sum(function(inputs) * weight)."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    y.backward(weight.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def assert_rounded_once(found: list[Tensor], exact: list[Tensor], slack: float = 1.01) -> None:
    """Each 16-bit tensor is within half a unit in the last place of its largest value, for every element."""
    for ours, theirs in zip(found, exact, strict=True):
        unit = torch.finfo(ours.dtype).eps / 2
        assert (
            (ours.double() - theirs).abs() <= slack * unit * theirs.abs().clamp(min=1e-2 * theirs.abs().max())
        ).all()


NORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "layernorm": (lambda x, w, b: layer_norm(x, w, b, 1e-5), lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), 3),
    "rmsnorm": (
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w,
        2,
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_fp64(name):
    ours, theirs, count = NORMS[name]
    inputs = [drawn(5, 3, 16), *(drawn(16, seed=i + 2) for i in range(count - 1))]
    for mine, other in zip(
        gradients(ours, inputs, drawn(5, 3, 16, seed=9)),
        gradients(theirs, inputs, drawn(5, 3, 16, seed=9)),
        strict=True,
    ):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(ours, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", NORMS)
def test_sixteen_bit_norms_add_up_in_fp32(name, dtype):
    """4,096 rows: a weight gradient that is added up in 16 bit is wrong by ten per cent (torch's own on the CPU is)."""
    ours, theirs, count = NORMS[name]
    inputs = [drawn(1024, 4, 32, dtype=dtype), *(drawn(32, seed=i + 2, dtype=dtype) for i in range(count - 1))]
    weight = drawn(1024, 4, 32, seed=9, dtype=dtype) + 0.5
    found = gradients(ours, inputs, weight)
    assert all(tensor.dtype == dtype for tensor in found)
    assert_rounded_once(found, gradients(theirs, [x.double() for x in inputs], weight.double()))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    formula = {
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu-tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "relu": lambda x: x * (x > 0),
        "relu2": lambda x: x * x * (x > 0),
    }[name]
    x, weight = drawn(7, 11) * 2, drawn(7, 11, seed=2)
    for mine, other in zip(gradients(ACTIVATIONS[name], [x], weight), gradients(formula, [x], weight), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


def test_bias_gelu_and_swiglu():
    x, up, weight = drawn(7, 11), drawn(7, 11, seed=2), drawn(7, 11, seed=3)
    bias = drawn(11, seed=4)
    pairs = [
        (gelu_tanh, lambda x, b: F.gelu(x + b, approximate="tanh"), [x, bias]),
        (swiglu, lambda g, u: g * torch.sigmoid(g) * u, [x, up]),
    ]
    for ours, theirs, inputs in pairs:
        for mine, other in zip(gradients(ours, inputs, weight), gradients(theirs, inputs, weight), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(swiglu, (x.requires_grad_(), up.requires_grad_()))
    assert torch.equal(gelu_tanh(x, None), F.gelu(x, approximate="tanh"))


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "geglu-tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_activations(name):
    gate, up, weight = (drawn(7, 11, seed=seed) * 2 for seed in (1, 2, 3))
    ours = gradients(lambda g, u: gated(name, g, u), [gate, up], weight)
    exact = gradients(lambda g, u: GATES[name](g) * u, [gate, up], weight)
    for mine, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)
    assert torch.equal(GATED[name](gate, up), ours[0])
    assert torch.autograd.gradcheck(GATED[name], (gate.requires_grad_(), up.requires_grad_()))


def test_known_values_of_gated_activations():
    """GELU of 1 is the normal distribution function of 1."""
    gate, up = torch.ones(1, dtype=torch.float64), torch.full((1,), 3.0, dtype=torch.float64)
    known = {"swiglu": 3 / (1 + math.exp(-1)), "geglu": 3 * 0.8413447460685429, "geglu-tanh": 3 * 0.8411919906082768}
    assert {name: function(gate, up).item() for name, function in GATED.items()} == pytest.approx(known, rel=1e-15)
    assert ACTIVATIONS["relu2"](torch.tensor([-3.0, 3.0])).tolist() == [0.0, 9.0]


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", GATED)
def test_sixteen_bit_gated_activations_round_once(name, dtype):
    inputs, weight = [drawn(9, 50, dtype=dtype), drawn(9, 50, seed=2, dtype=dtype)], drawn(9, 50, seed=3, dtype=dtype)
    assert_rounded_once(
        gradients(GATED[name], inputs, weight),
        gradients(GATED[name], [x.double() for x in inputs], weight.double()),
        1.1,
    )


def test_swiglu_of_halves_of_one_tensor():
    """As the merged gate and up projections hand them over: views that are not contiguous."""
    both, weight = drawn(3, 2, 10), drawn(3, 2, 5, seed=2)
    found = gradients(lambda x: swiglu(*x.split(5, dim=-1)), [both], weight)
    expected = gradients(lambda x: F.silu(x[..., :5]) * x[..., 5:], [both], weight)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


def test_rotary_is_a_rotation_by_position():
    s, d, base = 6, 8, 10000.0
    x, y = drawn(s, 2, 3, d), drawn(s, 2, 3, d, seed=2)
    cos, sin = (
        table.view(s, 1, 1, -1) for table in rotary_tables(torch.arange(s), d, RotarySettings(base), torch.float64)
    )
    assert cos.dtype == torch.float64
    # Complex numbers x_i + i x_{i+d/2} times exp(i m theta_i).
    turn = torch.polar(
        torch.ones(s, d // 2, dtype=torch.float64),
        torch.arange(s)[:, None] * base ** (-torch.arange(0, d, 2).double() / d),
    )
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn.view(s, 1, 1, -1)
    torch.testing.assert_close(
        apply_rotary(x, cos, sin), torch.cat([turned.real, turned.imag], -1), rtol=1e-13, atol=1e-14
    )
    # Only distances matter to products.
    later = [
        table.view(s, 1, 1, -1) for table in rotary_tables(torch.arange(s) + 17, d, RotarySettings(base), torch.float64)
    ]
    near = torch.einsum("sbnd,tbnd->bnst", apply_rotary(x, cos, sin), apply_rotary(y, cos, sin))
    far = torch.einsum("sbnd,tbnd->bnst", apply_rotary(x, *later), apply_rotary(y, *later))
    torch.testing.assert_close(near, far, rtol=1e-11, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin), (x.requires_grad_(),))
    with pytest.raises(ValueError, match="7"):
        rotary_tables(torch.arange(2), 7, RotarySettings(base), torch.float64)


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32, torch.float64])
def test_embedding_gradient_of_frequent_tokens(dtype):
    ids = torch.randint(0, 4, (256, 16), generator=torch.Generator().manual_seed(1)) * 2
    weight, grad = drawn(9, 12, dtype=dtype), drawn(256, 16, 12, seed=2, dtype=dtype) + 0.5
    leaf = weight.clone().requires_grad_()
    rows = embedding(ids, leaf)
    assert torch.equal(rows, weight[ids])
    rows.backward(grad)
    assert leaf.grad is not None
    exact = torch.zeros(9, 12, dtype=torch.float64).index_add_(0, ids.view(-1), grad.double().view(-1, 12))
    if dtype in SIXTEEN:
        assert_rounded_once([leaf.grad], [exact])
    else:
        torch.testing.assert_close(leaf.grad.double(), exact, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0)
    assert not leaf.grad[1::2].any()


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32, torch.float64])
def test_fault_07_sum_of_squares_is_exact_enough_to_regroup(dtype):
    x = drawn(200_003, dtype=dtype) * 100
    whole = sum_of_squares(x)
    assert whole.dtype == torch.float64 and whole.dim() == 0
    assert whole.item() == pytest.approx(math.fsum((x.double() ** 2).tolist()), rel=1e-13)
    parts = torch.stack([sum_of_squares(piece) for piece in x.split([1, 70_000, 0, 130_002])]).sum()
    assert parts.item() == pytest.approx(whole.item(), rel=1e-13)
    assert torch.equal(sum_of_squares(x), whole)


def test_sum_of_squares_neither_overflows_nor_hides():
    assert sum_of_squares(torch.full((10,), 1e30)).item() == pytest.approx(1e61, rel=1e-6)
    assert sum_of_squares(torch.zeros(0)).item() == 0.0
    assert sum_of_squares(torch.tensor([1.0, float("inf")])).isinf()
    assert sum_of_squares(torch.tensor([1.0, float("nan")])).isnan()


def test_registry_names_every_op():
    assert set(describe()) == {*OPS, *MATRIX_OPS} and all(describe("cpu").values())
