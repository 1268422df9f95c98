"""--fp8 on the card: copies to the bit those of the CPU, products against float64, training near bf16's, graphs and
compiled casts.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fused_ops.fp8 import E4M3, E5M2, Quantised, add_weight_gradient, empty, fill, product, unavailable_reason
from megazero.system.device import cuda_available
from tests.e2e.command import metrics, relative, run
from tests.gpu.jobs import Outcome, assert_equal, deterministic_again, flags_of, job_on_card, train
from tests.gpu.synchronisation import raise_on_synchronisation

_MISSING = unavailable_reason("cuda") if cuda_available() else "torch finds no NVIDIA GPU on this machine"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]

NUMBERS = ["--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-3"]
SCALINGS = {"current": ["--fp8"], "delayed": ["--fp8", "delayed", "--fp8-amax-history", "4"]}
DISTANCE = 0.01
"""Of the loss from bf16's; on the CPU the same model and words are 0.0002 apart."""


@pytest.fixture(autouse=True)
def no_casts_compiled_by_other_tests() -> None:
    """Their shapes would count towards torch.compile's limit."""
    torch._dynamo.reset()


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))).to(dtype)


def copy_of(x: Tensor, dtype: torch.dtype, scale: float | None = None, compiled: bool = False) -> Quantised:
    made = empty(x, dtype, True)
    given = None if scale is None else torch.tensor(scale, device=x.device)
    fill("gradient" if dtype == E5M2 else "input", x, made, scale=given, compiled=compiled)
    return made


def held(copy: Quantised) -> Tensor:
    return copy.values.double() * copy.inverse.double()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_copies_are_those_of_the_cpu(
    dtype: torch.dtype, source: torch.dtype, scale: float | None, compiled: bool
) -> None:
    for spoil in (None, float("inf"), float("nan")):
        x = drawn(272, 144, seed=1, dtype=source)
        if spoil is not None:
            x[100, 7] = spoil
        there, here = copy_of(x.cuda(), dtype, scale, compiled), copy_of(x, dtype, scale)
        assert torch.equal(there.inverse.cpu().nan_to_num(7), here.inverse.nan_to_num(7))
        assert here.inverse.isfinite() == (spoil is None)
        if spoil is None:
            assert torch.equal(there.values.cpu().view(torch.uint8), here.values.view(torch.uint8))
            assert there.transposed is not None
            assert torch.equal(there.transposed.view(torch.uint8).t(), there.values.view(torch.uint8))


# An H100 aligns 32 products to the largest of them and cuts off the rest. Relative to the sum of absolute
# products, one element was off by 2^-9.6 at most; with fast sums over k = 8192 by 2^-8.0. In the norm a result was off
# by 2^-12.8 at most, and with fast sums by 2^-10.2.
OF_SIZE = {True: 2.0**-7, False: 2.0**-9}
OF_NORM = {True: 2.0**-9.5, False: 2.0**-12}


def near(found: Tensor, exact: Tensor, size: Tensor, fast: bool = False) -> bool:
    """Whether a product is the exact one but for the tensor core's sums and one rounding to its dtype.

    size: the sums of absolute products.
    """
    error, rounding = found.double() - exact, torch.finfo(found.dtype).eps / 2
    each = error.abs().le(1.01 * rounding * exact.abs() + OF_SIZE[fast] * size).all()
    return bool(each and error.norm() <= math.hypot(OF_NORM[fast], rounding) * exact.norm())


@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (1, 32, 48), (4096, 1536, 512), (250, 2064, 4112)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_against_float64(m: int, n: int, k: int, bias: bool) -> None:
    x, weight, grad = (
        copy_of(drawn(*shape, seed=seed).cuda(), dtype)
        for seed, (shape, dtype) in enumerate((((m, k), E4M3), ((n, k), E4M3), ((m, n), E5M2)))
    )
    added = drawn(n + 1, seed=4).cuda()[1:] if bias else None
    exact = held(x) @ held(weight).t() + (0 if added is None else added.double())
    size = held(x).abs() @ held(weight).abs().t()
    for fast in (True, False):
        y = product(x.values, weight.values, x.inverse, weight.inverse, torch.bfloat16, added, fast=fast)
        assert near(y, exact, size, fast), fast
    assert weight.transposed is not None and grad.transposed is not None and x.transposed is not None
    back = product(grad.values, weight.transposed, grad.inverse, weight.inverse, torch.bfloat16)
    assert near(back, held(grad) @ held(weight), held(grad).abs() @ held(weight).abs())
    if m % 16:
        return
    exact, size = held(grad).t() @ held(x), held(grad).abs().t() @ held(x).abs()
    for shift in (0, 1):
        into = torch.full((n * k + shift,), torch.nan, device="cuda")[shift:].view(n, k)
        for times in (1, 2):
            add_weight_gradient(grad.transposed, x.transposed, grad.inverse, x.inverse, into, times > 1)
            assert near(into, times * exact, times * size), (shift, times)


def test_what_is_not_finite_is_in_every_element() -> None:
    x, other = drawn(64, 32, seed=1).cuda(), copy_of(drawn(48, 32, seed=2).cuda(), E4M3)
    x[5, 5] = float("inf")
    for scale in (None, 1.0):
        bad = copy_of(x, E5M2, scale)
        assert product(bad.values, other.values, bad.inverse, other.inverse, torch.bfloat16).isnan().all()


def series(outcome: Outcome) -> list[float]:
    return [record.loss for record in outcome.records]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_loss_is_near_that_of_16_bits(precision: str, corpus: Path, tmp_path: Path) -> None:
    flags = flags_of([*NUMBERS, "--train-iters", "60", "--precision", precision], corpus, tmp_path / "cache")
    plain = series(train(flags))
    for name, more in SCALINGS.items():
        found = relative(series(train([*flags, *more])), plain)
        print(f"{precision}, {name}: {found:.5f}")
        assert 0 < found < DISTANCE, name


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    "more", [[], ["--activation", "swiglu", "--recompute-granularity", "full"]], ids=["plain", "swiglu-recompute"]
)
def test_graphs_train_as_ever(scaling: str, more: list[str], corpus: Path, tmp_path: Path) -> None:
    """Weights are cast in the graph of the first micro-batch, into the memory that the others' graph reads."""
    flags = flags_of(
        [*NUMBERS, *SCALINGS[scaling], *more, "--deterministic", "--train-iters", "20"], corpus, tmp_path / "cache"
    )
    with deterministic_again():
        eager, graphed = train(flags), train([*flags, "--cuda-graphs"])
    assert_equal(graphed, eager)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_casts_train_near_plain_ones(scaling: str, corpus: Path, tmp_path: Path) -> None:
    """Norms and other ops are compiled too, and round elsewhere."""
    flags = flags_of([*NUMBERS, *SCALINGS[scaling], "--train-iters", "20"], corpus, tmp_path / "cache")
    assert relative(series(train([*flags, "--compile"])), series(train(flags))) < DISTANCE
    both = train([*flags, "--compile", "--cuda-graphs"])
    assert relative(series(both), series(train(flags))) < DISTANCE


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_step_waits_for_nothing(scaling: str, corpus: Path, tmp_path: Path) -> None:
    flags = [*NUMBERS, *SCALINGS[scaling], "--train-iters", "50", "--log-interval", "50"]
    job, _ = job_on_card(flags_of(flags, corpus, tmp_path / "cache"))
    for _ in range(2):
        job.trainer.train_step(stop=False)
    with raise_on_synchronisation(job.grid.device):
        for _ in range(3):
            job.trainer.train_step(stop=False)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_layouts_that_share_the_card_are_near_one_process(scaling: str, corpus: Path, tmp_path: Path) -> None:
    """And that process is near the CPU's bf16. (An FP8 step on a CPU takes torch 2.11 sixteen seconds.)"""
    model = ["--num-layers", 4, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 64]
    flags = [*model, *NUMBERS, "--vocab-size", 1003, "--train-iters", 20, "--eval-iters", 0]
    flags += ["--data-path", corpus, "--data-cache-path", tmp_path / "cache"]

    def losses(ranks: int, *more: object) -> list[float]:
        path = tmp_path / "metrics" / str(len(list(tmp_path.glob("metrics/*"))))
        run(ranks, [*flags, *more, "--metrics-file", path], launcher=True)
        return [line["loss"] for line in metrics(path)]

    card = (*SCALINGS[scaling], "--device", "cuda", "--backend", "gloo")
    alone = losses(1, *card)
    assert relative(alone, losses(1, "--device", "cpu")) < DISTANCE
    for layout in (["--tp", 2, "--pp", 2], ["--tp", 2, "--sequence-parallel", "--zero-stage", 2]):
        assert relative(losses(4, *layout, *card), alone) < DISTANCE / 2, layout
