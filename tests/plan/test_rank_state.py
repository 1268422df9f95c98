"""What a search finds once about the model state of many runs is what each of these runs has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.mpu.axes import Coordinates, axes_of
from megazero.mpu.grid import Group
from megazero.pipeline.build import stages_of
from megazero.plan.rank_state import RankState, specs_of, stage_state
from megazero.train.init_from import model_source
from megazero.zero.frozen import specs_by_unit
from tests.parity.training import small_model

RANKS = 8
FLAGS = [*small_model(8, heads=4), "--data-path", "x", "--micro-batch-size", "1", "--global-batch-size", "32"]
STAGES = (
    "--pp 4",
    "--pp 4 --untie-embeddings-and-output-weights",
    "--pp 2 --partition 3 5 --tp 2",
    "--pp 2 --virtual-stages 2 --tp 2 --sequence-parallel",
    "--pp 2 --virtual-stages 2 --pipeline-schedule zb-v",
    "--tp 2",
    "--pp 2 --layer-pattern window:5,ffn:48",
)
"""Words of runs whose stages share out the layers each in its own way."""
BASE = "--pp 2 --tp 2 --zero-stage 1"
CHANGES = (
    "",
    "--micro-batch-size 2",
    "--global-batch-size 64",
    "--recompute-granularity full",
    "--seq-length 24",
    "--zero-stage 3",
    "--zero-shard-size 1",
    "--bucket-size 3000",
    "--precision bf16",
    "--sequence-parallel",
    "--offload-optimizer cpu",
    "--pipeline-schedule zb-h1",
    "--recompute-granularity full --zero-stage 2",
)


def run_of(words: str) -> Run:
    return parse_run([*FLAGS, *words.split()], RANKS, model_source)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("words", STAGES)
def test_specs_put_together_are_those_of_the_stages(words: str, rank: int | None) -> None:
    """rank: of adapters, beside which all other parameters are frozen."""
    run = run_of(words)
    run = replace(run, lora=replace(run.lora, lora_rank=rank))
    for pp_index in range(run.parallel.pp):
        for tp_index in range(run.parallel.tp):
            tp = Group(tuple(range(run.parallel.tp)), tp_index, None)
            units = [stage.units() for stage in stages_of(run, pp_index, tp, torch.device("meta"))]
            for trained in (True, False):
                own = specs_by_unit(units, trained=trained)
                assert specs_of(run, pp_index, tp_index, trained=trained) == own


@pytest.mark.parametrize("nccl", [False, True])
def test_runs_share_a_state_only_where_theirs_are_equal(nccl: bool) -> None:
    """Each is asked for behind the others, so a state that ignored a difference would be another run's."""
    for words in CHANGES:
        run = run_of(f"{BASE} {words}")
        axes = axes_of(run, RANKS)
        for stage in range(axes.pp):
            found = stage_state(run, axes, stage, nccl=nccl)
            own = RankState(run, axes, Coordinates(stage, 0, 0, 0), nccl=nccl)
            assert (found.shape, found.bytes) == (own.shape, own.bytes), words


@pytest.mark.parametrize("words", ["--micro-batch-size 2", "--global-batch-size 64", "--recompute-granularity full"])
def test_batch_and_recomputation_change_no_state(words: str) -> None:
    states = [stage_state(run, axes_of(run, RANKS), 1) for run in (run_of(BASE), run_of(f"{BASE} {words}"))]
    assert states[0] is states[1]
