"""Optimizer steps against torch.optim in fp64, and what a skipped step leaves."""

from typing import Any

import pytest
import torch

from fused_ops import adam
from fused_ops.adam import adam_step, average_step, sgd_step
from tests.fused_ops.levels import adam_settings, drawn, scalar, sgd_settings


@pytest.fixture(params=["host", "device"])
def path(request, monkeypatch):
    """Both ways through the step: the one where the host reads `skip`, and the one of a GPU, where it must not."""
    if request.param == "device":
        monkeypatch.setattr(adam, "_is_readable", lambda scalar: False)


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs_over_many_steps(path, decoupled, decay):
    n = 70_000  # more than one block
    ours, theirs = drawn(n, seed=1), torch.nn.Parameter(drawn(n, seed=1))
    m, v = torch.zeros_like(ours), torch.zeros_like(ours)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    changes = {"weight_decay": decay, "decoupled": decoupled}
    for number in range(1, 41):
        lr, multiplier = 1e-2 / number, 1.0 / (1 + number % 3)
        grad = drawn(n, seed=100 + number) * 10.0 ** (number % 5 - 2)
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = grad * multiplier
        optimizer.step()
        settings = adam_settings(number, lr=lr, multiplier=scalar(multiplier), **changes)
        adam_step(None, ours, grad, m, v, **settings)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(m, optimizer.state[theirs]["exp_avg"], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(v, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_is_torchs(path, decay):
    ours, theirs = drawn(70_000, seed=1), torch.nn.Parameter(drawn(70_000, seed=1))
    buffer = torch.zeros_like(ours)
    optimizer = torch.optim.SGD([theirs], lr=1e-2, momentum=0.9, weight_decay=decay)
    for number in range(50):
        grad = drawn(70_000, seed=100 + number)
        theirs.grad = grad * 0.25
        optimizer.step()
        sgd_step(None, ours, grad, buffer, **sgd_settings(lr=1e-2, weight_decay=decay, multiplier=scalar(0.25)))
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", [0.1, 0.999])
def test_an_average_is_what_its_formula_says(path, decay):
    average, expected = drawn(70_000, seed=1), drawn(70_000, seed=1)
    for number in range(5):
        weights = drawn(70_000, seed=10 + number)
        average_step(average, weights, decay=decay, skip=torch.tensor(number == 2))
        expected = expected if number == 2 else decay * expected + (1 - decay) * weights
    torch.testing.assert_close(average, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_fault_15_a_skipped_step_leaves_every_bit(path, poison):
    """Rows 14 and 15: an overflow on one rank never reaches the weights or the moments."""
    n = 70_000
    master, m, v = (drawn(n, seed=seed, dtype=torch.float32).abs() for seed in (1, 2, 3))
    average = m.clone()
    m[:5], master[:5], average[:9] = -0.0, -0.0, -0.0
    out = master.to(torch.bfloat16)
    before = [tensor.clone() for tensor in (master, m, v, out, average)]
    grad = drawn(n, seed=4, dtype=torch.bfloat16)
    grad[::7] = poison
    skipped: dict[str, Any] = {"lr": 1.0, "multiplier": scalar(poison), "skip": torch.tensor(True)}
    adam_step(out, master, grad, m, v, **adam_settings(**skipped))
    sgd_step(out, master, grad, m, **sgd_settings(**skipped))
    average_step(average, master, decay=0.9, skip=torch.tensor(True))
    for old, new in zip(before, (master, m, v, out, average), strict=True):
        kind = torch.int16 if old.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(old.view(kind), new.view(kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bit_parameters_are_the_rounded_master(path, dtype, grad_dtype):
    n = 70_000
    master = drawn(n, seed=1, dtype=torch.float32)
    m, v, out = torch.zeros(n), torch.zeros(n), torch.full((n,), 7.0, dtype=dtype)
    exact, exact_m, exact_v = master.double(), m.double(), v.double()
    for number in range(1, 6):
        grad = drawn(n, seed=10 + number, dtype=grad_dtype)
        settings = adam_settings(number, multiplier=scalar(1 / 3))
        adam_step(out, master, grad, m, v, **settings)
        adam_step(None, exact, grad, exact_m, exact_v, **settings)
    assert torch.equal(out, master.to(dtype))
    # fp32 state follows fp64 closely, so the 16-bit gradient was widened before it was multiplied.
    torch.testing.assert_close(master.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(m.double(), exact_m, rtol=1e-5, atol=1e-7)


def test_an_empty_shard_is_fine():
    adam_step(None, *(torch.zeros(0) for _ in range(4)), **adam_settings())
