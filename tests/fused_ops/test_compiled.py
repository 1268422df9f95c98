"""Compiled bodies beside the plain ones, op by op; and what keeps them from being compiled twice or where they should
not be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fused_ops.compiled import compilable, compiled_bodies, try_compiler
from fused_ops.gated import GATED
from fused_ops.head_norm import norm_heads
from fused_ops.layernorm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fused_ops.native.compile import CompileError, compiler
from fused_ops.registry import COMPILABLE, compiled
from fused_ops.rotary import rotary_tables, rotate_mixed
from fused_ops.softmax import alibi_slopes, scaled_causal_alibi_softmax
from megazero.config.rotary import RotarySettings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def reference_bodies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")
    try:
        compiler()
    except CompileError:
        pytest.skip("no compiler, nothing is compiled")
    yield
    torch._dynamo.reset()


def rotary(mixed: Tensor) -> Tensor:
    return rotate_mixed(
        mixed,
        2,
        3,
        *(table[:, None, None] for table in rotary_tables(torch.arange(6), 8, RotarySettings(), mixed.dtype)),
    )


def softmax(scores: Tensor) -> Tensor:
    slopes = torch.tensor(alibi_slopes(3), dtype=torch.float64)
    documents = torch.arange(11) * torch.arange(1, 3)[:, None] // 4
    return scaled_causal_alibi_softmax(scores * 1.0, 0.3, slopes, documents=documents)


# The op and the shapes of its arguments.
OPS: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, Tensor]], tuple[tuple[int, ...], ...]]] = {
    "layernorm": (lambda x, w, b: layer_norm(x, w, b, 1e-5), ((5, 3, 16), (16,), (16,))),
    "layernorm of a sum": (lambda x, r, w, b: add_layer_norm(x, r, w, b, 1e-5), ((5, 3, 16), (5, 3, 16), (16,), (16,))),
    "rmsnorm": (lambda x, w: rms_norm(x, w, 1e-5), ((5, 3, 16), (16,))),
    "rmsnorm of a sum": (lambda x, r, w: add_rms_norm(x, r, w, 1e-5), ((5, 3, 16), (5, 3, 16), (16,))),
    **{name: (function, ((5, 3, 16), (5, 3, 16))) for name, function in GATED.items()},
    "rmsnorm of heads": (lambda m, q, k: norm_heads(m, 2, 3, q, k, 1e-5, 1.0), ((6, 2, 2 * 5 * 8), (8,), (8,))),
    "rotary": (rotary, ((6, 2, 2 * 5 * 8),)),
    "softmax": (softmax, ((2, 3, 5, 11),)),
}


def results(op: Callable[..., Tensor | tuple[Tensor, Tensor]], given: list[Tensor], asked: bool) -> list[Tensor]:
    """Outputs, then gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    with compiled_bodies(asked):
        found = op(*leaves)
    outputs = list(found) if isinstance(found, tuple) else [found]
    kept = [output.detach().clone() for output in outputs]  # a softmax's backward writes over it
    draw = torch.Generator().manual_seed(2)
    weights = [torch.randn(o.shape, generator=draw, dtype=torch.float64).to(o.dtype) for o in outputs]
    return [*kept, *torch.autograd.grad(outputs, leaves, weights)]


@pytest.mark.slow
@pytest.mark.sampled(strength=1)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1.6e-2)]
)
@pytest.mark.parametrize("name", OPS)
def test_compiled_equals_plain(name: str, dtype: torch.dtype, tolerance: float) -> None:
    op, shapes = OPS[name]
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    for ours, theirs in zip(results(op, given, True), results(op, given, False), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.slow
def test_a_body_is_compiled_once_for_all_layers_and_only_with_gradients() -> None:
    torch._dynamo.utils.counters.clear()
    for _ in range(20):
        given = [torch.randn(5, 3, 16), torch.randn(16), torch.randn(16)]
        results(OPS["layernorm"][0], given, True)
    with compiled_bodies(True), torch.no_grad():
        layer_norm(torch.randn(7, 3, 16), given[1], given[2], 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_what_cannot_be_traced_as_a_whole_is_an_error() -> None:
    @compilable
    def body(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2

    x = torch.ones(3, requires_grad=True)
    assert body(x).sum() == 6
    with compiled_bodies(True), pytest.raises(Exception, match="graph_break"):
        body(x)


def test_ops_with_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled("cpu", torch.bfloat16) == COMPILABLE
    assert compiled("cpu", torch.float64) == COMPILABLE
    monkeypatch.setenv("MEGAZERO_FUSED", "auto")
    assert compiled("cpu", torch.bfloat16) == ()
    assert compiled("cpu", torch.float64) == COMPILABLE
    assert compiled("cuda", torch.bfloat16) == COMPILABLE


def test_without_a_compiler_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = try_compiler("cpu")
    assert reason is not None and "no-such-compiler" in reason and "\n" not in reason


def test_a_compiler_whose_code_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones doubled and increased are threes whichever of them is read."""
    monkeypatch.setattr(torch, "compile", lambda body, **how: lambda x: body(x).roll(1))
    assert "gives other numbers" in str(try_compiler("cpu"))


@pytest.mark.slow
def test_the_compiler_is_not_imported_without_the_flag() -> None:
    """It takes a second and 70 MB in every rank."""
    program = """
import sys
from megazero.cli.pretrain import train
from megazero.mpu.meeting import Environment
train(["--validate-only", "--vocab-size", "100"], Environment.read())
raise SystemExit(3 if "torch._dynamo" in sys.modules else 4 if "megazero.train.job" in sys.modules else 5)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 4, "the run is imported, and the compiler is not"
