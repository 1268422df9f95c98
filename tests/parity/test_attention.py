"""Training through each body of attention is the same training, in float64, where nothing but rounding may differ.

FlexAttention runs as on a GPU up to the generated code: traced whole with its backward (aot_eager), with the check that
refuses CPUs taken out. What a layout does to it is here: recomputation, deferred backwards, shards of heads, evaluation
without gradients.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as torchs

from fused_ops import attention
from fused_ops.attention import flex as attention_flex
from fused_ops.attention.selection import AttentionCase, AttentionChoice, AttentionSupport, Body
from megazero.telemetry.record import StepRecord
from tests.parameters import Piece, assemble, values_of
from tests.parity.training import Outcome, data_flags, job_on_rank, small_model, train, worst
from tests.ranks import run_ranks

MODEL = [*small_model(2, heads=6), "--hidden-size", "96", "--seq-length", "24"]
NUMBERS = "--precision fp64 --micro-batch-size 2 --global-batch-size 4 --train-iters 3"
DOCUMENTS = ["--document-mask", "--eod-id", "7"]
GROUPED = ["--position-embedding", "rotary", "--num-query-groups", "2"]
TOLERANCE = 1e-10


def through_flex(
    rank: int, size: int, flags: list[str]
) -> tuple[list[StepRecord], dict[str, float], list[Piece], int, list[tuple[bool, int]]]:
    """Train with FlexAttention wherever gradients are recorded, and evaluate with it: its compiled graphs and calls,
    too.
    """
    calls: list[tuple[bool, int]] = []

    def chosen(case: AttentionCase, support: AttentionSupport) -> AttentionChoice:
        calls.append((case.recorded, case.length))
        return AttentionChoice(Body.FLEX, "")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = cache(partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "_validate_device", lambda query, key, value: None)
        patch.setattr(attention_flex, "compiled_for", lambda function, *signature: compiled(function))
        patch.setattr(attention, "choose", chosen)
        job, recorder = job_on_rank(rank, size, flags)
        job.fit()
    job.state.model.wait_parameters()
    weights: list[Piece] = values_of(nn.ModuleList(job.stages))
    return recorder.records, recorder.losses, weights, torch._dynamo.utils.counters["stats"]["unique_graphs"], calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--tp", "2", "--recompute-granularity", "full", *GROUPED, *DOCUMENTS]),
        (1, ["--pipeline-schedule", "zb-h1", "--recompute-granularity", "selective"]),
    ],
)
def test_flex_equals_softmax(ranks: int, flags: list[str], corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *NUMBERS.split(), *flags, *data_flags(corpus, tmp_path / "cache"), "--device", "cpu"]
    results = run_ranks(ranks, through_flex, ranks, flags)
    records, losses, _, graphs, calls = results[0]
    # With gradients and without, and the blocks; whatever the layers, micro-batches, documents and steps.
    assert graphs == 2 + ("--document-mask" in flags)
    assert {recorded for recorded, _ in calls} == {False, True}
    ours = Outcome(records, losses, assemble([pieces for _, _, pieces, *_ in results]))
    differences = worst(ours, train(ranks, [*flags, "--attention", "softmax"]))
    assert all(value < TOLERANCE for value in differences.values()), differences
