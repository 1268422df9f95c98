"""A unit is measured once for all runs that compute the unit alike."""

from __future__ import annotations

import pytest
import torch

from fused_ops.attention.selection import Body
from fused_ops.native.library import choice
from megazero.config.derive import FULL, NONE, SELECTIVE
from megazero.model.stage import StageSpec
from megazero.pipeline.measured import MeasuredCase, _measured, measured, recorded
from tests.plan.test_activations import parsed

MODEL = (
    "--data-path no-corpus --num-layers 4 --hidden-size 48 --num-attention-heads 6 --seq-length 20 --vocab-size 173 "
    "--global-batch-size 24 --micro-batch-size 3 --train-iters 4"
)
UNITS = {
    "embedding": (StageSpec(range(0), True, False), NONE),
    "block": (StageSpec(range(1, 2), False, False), NONE),
    "block, selective": (StageSpec(range(1, 2), False, False), SELECTIVE),
    "block, full": (StageSpec(range(1, 2), False, False), FULL),
    "head": (StageSpec(range(0), False, True), NONE),
}
ELSEWHERE = [
    "--zero-stage 3 --offload-params cpu --offload-optimizer cpu --lr 0.3 --seed 17",
    "--zero-stage 3 --init-from there --lora-rank 3 --lora-base-bits 4",
    "--pp 2 --pipeline-schedule zb-h1 --micro-batch-order vertical --precision fp32",
    "--offload-activations cpu --recompute-granularity full --untie-embeddings-and-output-weights --precision bf16",
    "--tp 2 --distribute-saved-activations --recompute-granularity full --no-overlap",
    "--precision fp64 --z-loss 0.1 --layer-pattern window:3,full --hidden-dropout 0.1 --late-update",
]


def cases(words: str, body: Body, kind: str) -> list[MeasuredCase]:
    run = parsed(f"{MODEL} {words}", 4)
    return [MeasuredCase(run, body, kind, spec, recompute, spec.blocks.start > 0) for spec, recompute in UNITS.values()]


@pytest.mark.parametrize(("body", "kind"), [(Body.SOFTMAX, "cpu"), (Body.FLASH, "cuda")])
@pytest.mark.parametrize("words", ELSEWHERE)
def test_what_is_left_out_of_a_run_changes_nothing(words: str, body: Body, kind: str) -> None:
    for case in cases(words, body, kind):
        own = _measured.__wrapped__(case, choice(), torch.get_num_threads())
        assert (measured(case), recorded(case)) == (own.nbytes, own.work), case.spec


def test_runs_that_differ_elsewhere_share_a_measurement() -> None:
    cases_of = [
        cases(words, Body.SOFTMAX, "cpu") for words in ("", "--zero-stage 3 --lr 0.5", "--offload-gradients cpu")
    ]
    before = _measured.cache_info().misses
    assert [[measured(case) for case in each] for each in cases_of[1:]] == [[measured(c) for c in cases_of[0]]] * 2
    assert _measured.cache_info().misses - before <= len(UNITS)


@pytest.mark.parametrize(
    "words",
    ["--tp 2", "--micro-batch-size 2", "--precision fp32", "--init-from there --lora-rank 2", "--seq-length 16"],
)
def test_what_a_unit_reads_is_measured_anew(words: str) -> None:
    changed, plain = (cases(more, Body.SOFTMAX, "cpu")[1] for more in (words, ""))
    assert measured(changed) != measured(plain)
