"""--compile is the same program: every gradient, loss, norm and weight of a layout with it against the same layout
without, in float64.

Where it could go wrong: recomputation runs a compiled forward inside a backward, a split backward keeps what a layer
saved beyond the backward that compiled code frees, and each body must be compiled once, not once per layer, chunk or
step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fused_ops.native.compile import CompileError, compiler
from megazero.config.parse import ConfigError, parse_run
from megazero.data.progress import silent
from megazero.telemetry.record import StepRecord
from megazero.train.prepare import prepare
from tests.parameters import held_fragments, worst_difference
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

STEPS = 2
MODEL = small_model(4, heads=4)
NUMBERS = ["--precision", "fp64", "--micro-batch-size", "1", "--global-batch-size", "4", "--bucket-size", "2000"]
LLAMA = "--position-embedding rotary --norm rmsnorm --activation swiglu --num-query-groups 2 --disable-bias-linear "
EVEN = "--partition 1 1 1 1 "
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 "
# Name -> ranks, flags, bodies that are compiled: a norm, a norm of a sum, and softmax; or both norms, rotary and
# SwiGLU.
LAYOUTS: dict[str, tuple[int, str, int]] = {
    "one": (1, "--document-mask --eod-id 7", 3),
    "llama-full": (1, LLAMA + "--recompute-granularity full --recompute-num-layers 2", 4),
    "tp2-sp-selective": (2, DROPOUT + "--tp 2 --sequence-parallel --recompute-granularity selective", 3),
    "pp2-interleaved": (2, EVEN + "--pp 2 --virtual-stages 2", 3),
    "llama-zb-h1-zero2-full": (
        2,
        LLAMA + DROPOUT + "--pipeline-schedule zb-h1 --zero-stage 2 --recompute-granularity full",
        5,
    ),
    "llama-zb-v": (2, LLAMA + EVEN + "--pp 2 --pipeline-schedule zb-v --virtual-stages 2", 4),
    "zb-v-selective": (
        2,
        EVEN + "--pp 2 --pipeline-schedule zb-v --virtual-stages 2 --recompute-granularity selective",
        3,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def a_compiler() -> None:
    try:
        compiler()
    except CompileError:
        pytest.skip("no compiler, nothing is compiled")


def steps_on_rank(
    rank: int, size: int, flags: list[str]
) -> tuple[list[StepRecord], list[dict[str, Tensor]], dict[str, Tensor], int]:
    """Records; first moments after each step, which hold its gradients; weights; compiled graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    job, recorder = job_on_rank(rank, size, flags)
    moments = []
    for _ in range(STEPS):
        job.trainer.train_step(stop=False)
        job.trainer.after_step()
        fragments = held_fragments(job.state.optimizer)
        moments.append({f"{i}": fragment.columns["exp_avg"].clone() for i, fragment in enumerate(fragments)})
    job.trainer.evaluate()
    job.state.model.wait_parameters()
    weights = {name: p.detach().clone() for stage in job.stages for name, p in stage.named_parameters()}
    return recorder.records, moments, weights, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_equals_plain(name: str, corpus: Path, tmp_path: Path) -> None:
    ranks, layout, bodies = LAYOUTS[name]
    flags = [*MODEL, *NUMBERS, *layout.split(), *data_flags(corpus, tmp_path / "cache"), "--train-iters", str(STEPS)]
    plain = run_ranks(ranks, steps_on_rank, ranks, flags)
    compiled = run_ranks(ranks, steps_on_rank, ranks, [*flags, "--compile"])
    assert [graphs for *_, graphs in plain] == [0] * ranks
    assert [graphs for *_, graphs in compiled] == [bodies + 1] * ranks  # and the trial before the run
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours[2].keys() == theirs[2].keys() and not any("_orig_mod" in key for key in ours[2])
        for mine, other in zip([*ours[1], ours[2]], [*theirs[1], theirs[2]], strict=True):
            assert worst_difference(mine, other, floor=1e-13)[0] < 1e-11
        for record, other_record in zip(ours[0], theirs[0], strict=True):
            assert record.loss == pytest.approx(other_record.loss, rel=1e-12)
            assert record.grad_norm == pytest.approx(other_record.grad_norm, rel=1e-11)


def test_a_missing_compiler_is_an_error_of_the_flag_before_training(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = parse_run([*MODEL, *NUMBERS, *data_flags(corpus, tmp_path / "cache"), "--device", "cpu", "--compile"], 1)
    with pytest.raises(ConfigError, match="--compile: no C\\+\\+ compiler"):
        prepare(run, 1, silent)
