"""Products that torch computes slowly on a CPU: every body against float64, and in a whole training step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from fused_ops import products
from fused_ops.attention.cached import cached_attention
from fused_ops.attention.reference import reference_attention
from fused_ops.blocks import HALVES
from fused_ops.linear import add_weight_gradient, input_gradient, linear, linear_into
from fused_ops.native import library
from fused_ops.products import (
    COLUMNS,
    DEPTH,
    LEAST,
    ROWS,
    add_row_product,
    body_of,
    input_product,
    lacks_products,
    own_products,
    product,
    weight_product,
)
from fused_ops.registry import product_bodies
from megazero.config.parse import parse_run
from megazero.data.progress import silent
from megazero.mpu.axes import axes_of
from megazero.mpu.grid import build_grid
from megazero.train.job import build_job
from megazero.train.prepare import prepare
from tests.fused_ops.levels import CPU_LEVELS, drawn, the_same_for_any_threads
from tests.parity.training import data_flags, small_model

SHAPES = [(1, 1, 1), (7, COLUMNS - 1, 33), (40, COLUMNS + 1, 65), (ROWS + 3, 3 * COLUMNS, 40), (5, 40, ROWS + 7)]
SHAPES += [(ROWS + 3, 9, DEPTH + 3), (780, 70, 520), (13, 31, 0)]
"""m, n, k: one block of the result and less, blocks with a rest, whole blocks; nothing to sum. In the kernel a tile has
at most 768 x 512 elements, and 512 of k are packed at a time.
"""
PLAIN = "reference"


@pytest.fixture(params=[PLAIN, *CPU_LEVELS])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plain body, or the kernel of an instruction set. Samples know the name."""
    name: str = request.param
    monkeypatch.setenv("MEGAZERO_FUSED", name)
    if name != PLAIN and library.cpu_library(name) is None:
        pytest.skip("no compiler, no kernels")
    return name


def once_rounded(found: Tensor, exact: Tensor, scale: Tensor) -> bool:
    """scale: the same sums of absolute values, for the error of the fp32 sums."""
    rounding = torch.finfo(found.dtype).eps / 2 * exact.abs() if found.dtype.itemsize == 2 else 0.0
    return bool(((found.double() - exact).abs() <= rounding + 2e-6 * scale + 1e-7).all())


class Products(TorchDispatchMode):
    """Writes down matrix products of 16-bit factors."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: list[str] = []
        self.wide = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "mv", "dot"):
            halves = any(isinstance(given, Tensor) and given.dtype.itemsize == 2 for given in args)
            self.narrow += [name] if halves else []
            self.wide += not halves
        return func(*args, **(kwargs or {}))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without 16-bit products."""
    monkeypatch.setattr(products, "_has_products", lambda dtype: False)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", (torch.float32, *HALVES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_product_is_rounded_once(shape: tuple[int, int, int], dtype: torch.dtype, level: str) -> None:
    """Factors that are parts of wider tensors; a bias; three dimensions; a result in given memory."""
    assert (products._kernel(dtype, level) is None) == (level == PLAIN)
    m, n, k = shape
    x, weight = drawn(m, k + 1, dtype=dtype, seed=1)[:, :k], drawn(n + 1, k, dtype=dtype, seed=2)[1:]
    grad, bias = drawn(m, n + 3, dtype=dtype, seed=3)[:, 2 : n + 2], drawn(n, dtype=dtype, seed=4)
    wide_x, wide_weight, wide_grad = x.double(), weight.double(), grad.double()

    exact, scale = wide_x @ wide_weight.t(), wide_x.abs() @ wide_weight.abs().t()
    assert once_rounded(weight_product(x.unsqueeze(1), weight).squeeze(1), exact, scale)
    assert once_rounded(weight_product(x, weight, bias), exact + bias.double(), scale + bias.double().abs())
    into = torch.full((m, n), torch.nan, dtype=dtype)
    assert weight_product(x, weight, out=into) is into and once_rounded(into, exact, scale)

    found = input_product(grad.unsqueeze(0), weight)
    assert found.is_contiguous() and found.shape == (1, m, k)
    assert once_rounded(found[0], wide_grad @ wide_weight, wide_grad.abs() @ wide_weight.abs())

    for wider in (dtype, torch.float32):
        total = torch.full((n, k), torch.nan, dtype=wider)
        exact, scale = wide_grad.t() @ wide_x, wide_grad.abs().t() @ wide_x.abs()
        add_row_product(grad, x, total, False)
        assert once_rounded(total, exact, scale)
        before = total.double()
        add_row_product(grad, x, total, True)
        assert once_rounded(total, before + exact, before.abs() + scale)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_of_batches_and_its_gradients(dtype: torch.dtype, level: str) -> None:
    a, b = (drawn(3, *shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate([(5, 7), (7, 4)]))
    grad = drawn(3, 5, 4, dtype=dtype, seed=9)
    found = product(a, b, 0.3)
    found.backward(grad)
    exact_a, exact_b = (factor.detach().double().requires_grad_() for factor in (a, b))
    exact = 0.3 * (exact_a @ exact_b)
    exact.backward(grad.double())
    assert a.grad is not None and b.grad is not None and exact_a.grad is not None and exact_b.grad is not None
    for one, other in ((found, exact), (a.grad, exact_a.grad), (b.grad, exact_b.grad)):
        assert one.dtype == dtype and once_rounded(one.detach(), other.detach(), torch.full_like(other, 10.0))


@pytest.mark.parametrize("cpu_level", CPU_LEVELS)
def test_any_number_of_threads_gives_the_same_bits(cpu_level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of other sizes, and a sum in several packings."""
    monkeypatch.setenv("MEGAZERO_FUSED", cpu_level)
    if library.cpu_library(cpu_level) is None:
        pytest.skip("no compiler, no kernels")
    grad, weight = drawn(1200, 1100, dtype=torch.bfloat16, seed=1), drawn(1100, 300, dtype=torch.bfloat16, seed=2)
    the_same_for_any_threads(lambda: [input_product(grad, weight), weight_product(weight, weight)])


@pytest.mark.parametrize("strange", ["sum", "stride", "batch", "narrow"])
def test_a_wrong_kernel_is_refused(strange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial notices a missing summand, another line's stride, the first matrix in place of the second, and results
    of 16 bits without the last one.
    """
    monkeypatch.setenv("MEGAZERO_FUSED", "auto")
    kernel = library.cpu_library("auto")
    if kernel is None:
        pytest.skip("no compiler, no kernels")
    call = kernel.call

    def wrong(name: str, numbers: tuple[int, ...], *rest: Any) -> None:
        places = {"sum": (3, -1), "stride": (9, 1), "batch": (4, -numbers[4]), "narrow": (0, 0)}
        at, more = places[strange]
        call(name, (*numbers[:at], numbers[at] + more, *numbers[at + 1 :]), *rest)
        into = rest[3]
        if strange == "narrow" and into.dtype == torch.bfloat16:
            into.view(torch.int16).bitwise_and_(-2)

    refusal = products.refusal.__wrapped__
    assert refusal(kernel, torch.bfloat16) == ""
    monkeypatch.setattr(kernel, "call", wrong)
    assert "off by" in refusal(kernel, torch.bfloat16)


def test_fp32_is_computed_here_on_amd_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both makers' answers, whatever this machine is; never without a kernel."""
    x = torch.ones(512, 256)
    monkeypatch.setenv("MEGAZERO_FUSED", "auto")
    for faster in (True, False):
        monkeypatch.setattr(products, "_is_faster", lambda faster=faster: faster)
        assert own_products(x, 256, 256) == (faster and library.cpu_library("auto") is not None)
        assert (body_of(torch.float32) != "torch") == own_products(x, 256, 256)
        assert not own_products(x.double(), 256, 256) and not own_products(x.to("meta"), 256, 256)
    monkeypatch.setattr(products, "_is_faster", lambda: True)
    monkeypatch.setenv("MEGAZERO_FUSED", PLAIN)
    assert not own_products(x, 256, 256) and body_of(torch.float32) == "torch"


@torch.no_grad()
def test_fp32_that_is_small_or_thin_is_left_to_torch(kernel_calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three products, by each of its three sizes."""
    monkeypatch.setenv("MEGAZERO_FUSED", "auto")
    monkeypatch.setattr(products, "_is_faster", lambda: True)
    for m, n, k in ((LEAST, LEAST, LEAST), (LEAST - 1, 300, 300), (300, LEAST - 1, 300), (300, 300, LEAST - 1)):
        x, weight, grad = torch.ones(m, k), torch.ones(n, k), torch.ones(m, n)
        linear(x.view(1, m, k), weight, None)
        linear_into(x, weight, x.new_empty(m, n))
        input_gradient(grad, weight)
        add_weight_gradient(grad, x, torch.zeros(n, k), True)
        large = min(m, n, k) >= LEAST and library.cpu_library("auto") is not None
        assert len(kernel_calls) == 4 * large, (m, n, k)
        kernel_calls.clear()


@pytest.mark.parametrize("units", [(), ("avx512_bf16",)])
def test_bf16_that_is_taken_apart_counts_as_none(units: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX-512 without BF16: torch says that oneDNN multiplies bf16 there, and it does, half as fast as fp32."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(products, "processor_flags", lambda: frozenset({"avx512f", "avx512bw", *units}))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert products._has_products.__wrapped__(torch.bfloat16) == bool(units)
    for limit, has in (("avx512_core", False), ("AVX512_CORE_VNNI", False), ("AVX512_CORE_BF16", bool(units))):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)  # oneDNN does without what the processor has
        assert products._has_products.__wrapped__(torch.bfloat16) == has


def test_a_refused_kernel_is_said(without: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its reason, where the doctor says what multiplies."""
    monkeypatch.setattr(products, "refusal", lambda library, dtype: "off by 7.2e-03 on this machine")
    if (built := library.cpu_library("auto")) is None:
        pytest.skip("no compiler, no kernels")
    products._kernel.cache_clear()
    wanted = f"torch in fp32, block by block, as the {built.level} kernel is off by 7.2e-03 on this machine"
    assert body_of(torch.bfloat16) == wanted and f"bf16 by {wanted}; " in product_bodies()
    products._kernel.cache_clear()


def test_who_lacks_products(without: None) -> None:
    """Only 16-bit tensors on a CPU: no other dtype, and no other device."""
    for dtype in HALVES:
        assert lacks_products(torch.ones(1, dtype=dtype)) and not lacks_products(torch.ones(1, dtype=dtype).to("meta"))
    assert not any(lacks_products(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.int16))


def test_what_does_not_fit_is_refused() -> None:
    """Another k, another result, factors of two dtypes, another bias: nothing is read beside a tensor."""
    x, weight = drawn(30, 6, dtype=torch.bfloat16, seed=1), drawn(30, 9, dtype=torch.bfloat16, seed=2)
    with pytest.raises(
        ValueError, match=r"\[30, 6\] times torch.bfloat16 \[9, 30\] does not fit torch.bfloat16 \[30, 30\]"
    ):
        weight_product(x, weight)
    with pytest.raises(ValueError, match="does not fit"):
        add_row_product(x, x, torch.zeros(9, 6), False)
    with pytest.raises(ValueError, match="float32"):
        weight_product(x, weight[:, :6].float())
    for bias in (torch.zeros(29), torch.zeros(31), torch.zeros(1, 30)):
        with pytest.raises(ValueError, match="with a bias"):
            weight_product(x, weight[:, :6], bias.bfloat16())


def test_tensors_of_other_devices_are_refused() -> None:
    """The kernel would take their addresses, which are 0 here."""
    x, weight, away = torch.ones(30, 6), torch.ones(9, 6), torch.device("meta")
    for given in ((x, weight.to(away)), (x, weight, torch.ones(9, device=away)), (x.to(away), weight)):
        with pytest.raises(ValueError, match="on meta"):
            weight_product(*given)
    with pytest.raises(ValueError, match="on meta"):
        weight_product(x, weight, out=torch.ones(30, 9, device=away))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_a_bias_may_have_any_strides(rows: int, dtype: torch.dtype) -> None:
    """A kernel that takes its address would read beside it."""
    x, weight = drawn(rows, 8, dtype=dtype, seed=1), drawn(6, 8, dtype=dtype, seed=2)
    strided, one = drawn(6, 2, dtype=dtype, seed=3)[:, 0], drawn(1, dtype=dtype, seed=4).expand(6)
    for bias in (strided, one):
        assert torch.equal(linear(x, weight, bias), linear(x, weight, bias.clone()))
        exact = x.double() @ weight.double().t() + bias.double()
        assert (linear(x, weight, bias).double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


@torch.no_grad()
def test_few_rows_that_do_not_fit_are_refused() -> None:
    """Also where numbers of other shapes would be enough for the kernel of few rows."""
    x, weight = torch.ones(4, 6), torch.ones(9, 12)
    with pytest.raises((RuntimeError, ValueError)):
        linear(x, weight, None)
    with pytest.raises((RuntimeError, ValueError)):
        linear(x, weight[:, :6].contiguous(), torch.ones(8))


@pytest.mark.slow
def test_memory_grows_with_neither_tokens_nor_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's allocator. What widens a whole factor would take twice the factor."""
    monkeypatch.setenv("MEGAZERO_FUSED", PLAIN)
    grad, weight = (drawn(*shape, dtype=torch.bfloat16, seed=1) for shape in ((3 * DEPTH, DEPTH), (DEPTH, 9000)))
    sums = torch.zeros(600, 700)
    with profile(profile_memory=True) as recorded:
        made = input_product(grad[:600], weight), weight_product(grad[:600], grad)
        add_row_product(grad[:, :600], grad[:, :700], sums, True)
    assert recorded.kineto_results is not None
    sizes = [event.nbytes() for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    assert sorted(size for size in sizes if size > 4096) == sorted(one.nbytes for one in made)


def test_this_processor_is_asked() -> None:
    """As /proc/cpuinfo has it: x86 needs AVX-512's BF16 (or later additions to AVX2) for oneDNN's bf16."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "avx512_bf16" in flags:
        assert not lacks_products(torch.ones(1, dtype=torch.bfloat16))
    elif "avx2" in flags and "avx_ne_convert" not in flags:
        assert lacks_products(torch.ones(1, dtype=torch.bfloat16)) and lacks_products(torch.ones(1).half())


def uses() -> dict[str, Callable[[], object]]:
    x, weight, grad = (drawn(*shape, dtype=torch.bfloat16, seed=1) for shape in ((40, 24), (32, 24), (40, 32)))
    mixed = drawn(9, 2, 3 * 8, dtype=torch.bfloat16, seed=2).requires_grad_()

    def attention() -> None:
        context = reference_attention(mixed, 2, 1, 4, scale=0.5, slopes=None, documents=None)
        context.backward(torch.ones_like(context))

    return {
        "linear": torch.no_grad()(lambda: linear(x, weight, None)),
        "bias": torch.no_grad()(lambda: linear(x, weight, weight[:, 0].contiguous())),
        "into": lambda: linear_into(x, weight, x.new_empty(40, 32)),
        "input gradient": lambda: input_gradient(grad, weight),
        "weight gradient": lambda: add_weight_gradient(grad, x, torch.zeros(32, 24), True),
        "attention": attention,
    }


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes of the factors that the kernel has multiplied."""
    calls: list[str] = []
    call = products._call

    def counted(library: Any, a: Tensor, *rest: Any) -> None:
        calls.append(str(a.dtype))
        call(library, a, *rest)

    monkeypatch.setattr(products, "_call", counted)
    return calls


@pytest.mark.parametrize("choice", [PLAIN, "auto"])
@pytest.mark.parametrize("name", uses())
def test_each_use_multiplies_in_fp32(
    name: str, choice: str, without: None, kernel_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAZERO_FUSED", choice)
    with Products() as seen:
        uses()[name]()
    kernel = choice == "auto" and library.cpu_library("auto") is not None
    assert (kernel_calls if kernel else seen.wide) and not seen.narrow


def test_attention_on_a_cache_without_a_kernel_multiplies_in_fp32(
    without: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as where torch multiplies 16 bits, up to one rounding of the scores."""

    def context() -> Tensor:
        mixed = drawn(3, 2, 2 * 3 * 8, dtype=torch.bfloat16, seed=1)
        keys, values = (drawn(2, 2, 5, 8, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
        places = torch.arange(2), torch.tensor([1, 2])
        return cached_attention(mixed, keys, values, *places, 5, 2, 1, 8, scale=0.3, slopes=None)

    monkeypatch.setenv("MEGAZERO_FUSED", PLAIN)
    with Products() as seen:
        here = context()
    assert seen.wide and not seen.narrow
    monkeypatch.setattr(products, "_has_products", lambda dtype: True)
    assert torch.allclose(here.float(), context().float(), rtol=0.03, atol=0.02)


@pytest.mark.parametrize("dropout", ["0", "0.1"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_training_step_has_no_16_bit_product(
    precision: str, dropout: str, corpus: Path, tmp_path: Path, without: None, kernel_calls: list[str]
) -> None:
    """Also where attention draws dropout, which no kernel does."""
    flags = ["--global-batch-size", "2", "--micro-batch-size", "2", "--train-iters", "2", "--eval-iters", "0"]
    flags += ["--precision", precision, "--attention-dropout", dropout]
    prepared = prepare(parse_run([*small_model(2, heads=4), *flags, *data_flags(corpus, tmp_path)[:-2]], 1), 1, silent)
    trainer = build_job(prepared, build_grid(axes_of(prepared.run, 1), "cpu")).trainer
    trainer.log._sinks = ()
    with Products() as seen:
        trainer.train_step(stop=False)
        trainer.after_step()
    assert len(kernel_calls) + seen.wide > 10 and not seen.narrow, seen.narrow
