"""A plan counts no launches of micro-batches that --cuda-graphs replays."""

from __future__ import annotations

import pytest

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import Cluster, known_hardware

SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 2 --seq-length 64 --vocab-size 256 --precision bf16 "
    "--device cuda --train-iters 1 --position-embedding rotary --data-path x --eod-id 0 --micro-batch-size 1"
)


def run_of(ranks: int, words: str) -> Run:
    return parse_run([*SMALL.split(), *words.split()], ranks)


def cluster_of(ranks: int) -> Cluster:
    return known_hardware().cluster("h200", ranks, None, None)


@pytest.mark.parametrize(
    ("ranks", "batch", "least", "most"),
    [
        (1, 4, 0.0, 0.2),
        (2, 8, 0.49, 0.51),  # with replicas the first and the last of four micro-batches have messages
        (2, 4, 1.0, 1.0),
    ],
)
def test_a_replayed_micro_batch_takes_no_launches(ranks: int, batch: int, least: float, most: float) -> None:
    """The passes of so small layers take what their launches take."""
    plain, graphs = (
        ClusterStep(run_of(ranks, f"--global-batch-size {batch} {words}"), cluster_of(ranks)).times.forward[0]
        for words in ("", "--cuda-graphs")
    )
    assert least * plain <= graphs <= most * plain
