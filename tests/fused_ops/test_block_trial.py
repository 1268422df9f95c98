"""Block products that are borrowed of torch: how each processor wants its operands is found by trying, and what is
wrong is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_ops import linear, products, registry
from fused_ops.attention import causal_attention, kernel, trial
from fused_ops.attention.reach import Reach
from fused_ops.attention.selection import Body, choose
from fused_ops.attention.trial import AttentionWorkload
from fused_ops.linear import add_weight_gradient
from fused_ops.native import library
from fused_ops.native.binding import Library
from fused_ops.native.library import suffix
from fused_ops.products import lacks
from megazero.cli.doctor import examine
from tests.fused_ops.levels import drawn
from tests.fused_ops.processors import PROCESSORS, kernels_of, on_processor
from tests.fused_ops.test_attention import Case
from tests.fused_ops.test_attention_reach import check, inputs

pytestmark = pytest.mark.slow  # a library is compiled for them all
NONE, PAIRS, ROWS = range(3)
LAYOUTS = {"none": NONE, "pairs": PAIRS, "rows": ROWS}
HALVES = [torch.bfloat16, torch.float16]


def layout(found: Library, dtype: torch.dtype) -> int:
    answer = torch.full((), -1)
    found.call(f"block_layout_{suffix(dtype)}", answer)
    return int(answer)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_each_processor_gets_its_operands_as_it_wants_them(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = PROCESSORS[processor]
    found = kernels_of(tmp_path, workload, monkeypatch)
    assert [layout(found, dtype) for dtype in HALVES] == [LAYOUTS[workload[kind]] for kind in ("BF16", "FP16")]
    assert layout(found, torch.float32) == ROWS


@pytest.mark.parametrize("fault", ["zeros", "forgetful", "rounded", "swapped", "beyond"])
def test_a_product_that_is_wrong_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every dtype: what depends on it is then computed in float, without it."""
    found = kernels_of(tmp_path, dict.fromkeys(("FP32", "BF16", "FP16"), fault), monkeypatch)
    of_float = ROWS if fault == "swapped" else NONE  # floats come in no pairs
    assert [layout(found, dtype) for dtype in (*HALVES, torch.float32)] == [NONE, NONE, of_float]
    for dtype in (*HALVES, torch.float32):
        assert kernel.refusal(found, dtype) == ""
    for dtype in HALVES:
        assert linear.refusal(found, dtype) == ""


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_ops_are_right_on_each_processor(
    processor: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention forward and backward, and the weight gradient, with sizes that are no multiples of a block."""
    on_processor(processor, tmp_path, monkeypatch)
    for s, d, run in ((5, 8, 0), (150, 40, 0), (200, 33, 70)):
        Case(s, 2, 1, 2, d, dtype, run=run).check()
    mixed, options = inputs(600, 1, (1, 2, 33), sloped=True, run=300)
    check(causal_attention, mixed.to(dtype), (1, 2, 33), **options, reach=Reach(170))
    grad, x = drawn(131, 70, seed=1, dtype=dtype)[:, 1:38], drawn(131, 47, seed=2, dtype=dtype)[:, :45]
    exact, size = grad.double().t() @ x.double(), grad.double().abs().t() @ x.double().abs()
    into = torch.full((37, 45), torch.nan)
    assert linear._library(grad, x, into) is not None
    assert lacks(dtype) == (PROCESSORS[processor][suffix(dtype).upper()] == "none"), "the kernel here, or products.py's"
    for times in (1, 2):
        add_weight_gradient(grad, x, into, times == 2)
        assert ((into.double() - times * exact).abs() <= 2e-6 * times * size).all()


class Off(Library):
    """Kernels that are wrong although their products are right: half of what they write (name -> which argument) is too
    large.
    """

    def __init__(self, inner: Library, results: Mapping[str, int]) -> None:
        super().__init__(inner.path, inner.level)
        self.results = results

    def call(self, name: str, *arguments: Any) -> None:
        super().call(name, *arguments)
        for start, place in self.results.items():
            if name.startswith(start):
                arguments[place][::2] *= 1.1


@pytest.mark.parametrize("dtype", HALVES)
def test_an_op_that_is_off_is_refused(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = kernels_of(tmp_path, PROCESSORS["AMX-FP16"], monkeypatch)
    assert linear.refusal(Off(inner, {"weight_gradient": 7}), dtype).startswith("its numbers are off by")
    for name, place in (("attention_forward", 1), ("attention_backward", 4)):
        assert kernel.refusal(Off(inner, {name: place}), dtype).endswith("on this machine")


def test_what_is_refused_is_not_used_and_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = kernels_of(tmp_path, PROCESSORS["AMX-FP16"], monkeypatch)
    monkeypatch.setattr(products, "_has_products", lambda dtype: True)
    broken = Off(inner, {"weight_gradient": 7, "attention_forward": 1})
    for module in (library, trial, registry):
        monkeypatch.setattr(module, "torch_library", lambda asked: broken)
    trial.find_support.cache_clear()
    Case(60, 2, 1, 2, 16, torch.bfloat16).check()
    grad, x = drawn(40, 6, seed=1, dtype=torch.bfloat16), drawn(40, 5, seed=2, dtype=torch.bfloat16)
    into, exact = torch.full((6, 5), torch.nan), grad.double().t() @ x.double()
    add_weight_gradient(grad, x, into, False)
    assert (into.double() - exact).abs().max() <= 5e-3 * exact.abs().max()
    workload, cpu = AttentionWorkload(torch.bfloat16, 64, 1, 2, 1, 16), torch.device("cpu")
    found = choose(workload.case(cpu), trial.find_support("auto", workload, cpu))
    assert found.body is not Body.KERNEL and "no C++ kernel: its numbers are off by" in found.reason
    described = registry.describe("cpu", dtype=torch.bfloat16)
    assert {op for op, body in described.items() if body == registry.REFERENCE} == {"attention", "weight_gradient"}
    told = {finding.subject: finding for finding in examine()}
    assert told["block products"].state.endswith("f32 in rows, bf16 in pairs of rows, fp16 in pairs of rows")
    assert "refused: its numbers are off by" in told["weight_gradient in bf16"].advice and "attention in fp16" in told
    monkeypatch.setattr(products, "_has_products", lambda dtype: False)  # weight gradients are not its task then
    assert set(registry.refusals()) == {"attention in f32", "attention in bf16", "attention in fp16"}
    assert registry.describe("cpu", dtype=torch.bfloat16)["weight_gradient"] != registry.REFERENCE
    trial.find_support.cache_clear()
