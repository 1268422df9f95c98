"""The real model state: saved by one layout and ZeRO stage, loaded by others, parameters and moments equal."""

import math
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.format import FragmentSpec
from megazero.checkpoint.manager import Checkpoints
from megazero.checkpoint.resume_changes import record_of
from megazero.config.schema import CheckpointConfig, ModelConfig, OptimizerConfig, ParallelConfig, Run
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from megazero.pipeline.build import build_stages
from megazero.plan.rank_state import specs_of
from megazero.zero.layout import owned_fragments, packing_of
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.portions import initialise_state
from megazero.zero.state import ModelState
from tests.checkpoint.fakes import box_of
from tests.parameters import Piece, assemble, held_fragments, values_of
from tests.ranks import run_ranks

BASE = Run(
    model=ModelConfig(
        num_layers=3,
        hidden_size=24,
        num_attention_heads=4,
        vocab_size=61,
        seq_length=16,
        make_vocab_size_divisible_by=8,
    ),
    optimizer=OptimizerConfig(precision="bf16"),
)


def run_of(tp: int, pp: int, stage: int, precision: str, bucket: int, optimizer: str) -> Run:
    parallel = ParallelConfig(tp=tp, pp=pp, zero_stage=stage, bucket_size=bucket, device="cpu")
    return replace(BASE, parallel=parallel, optimizer=replace(BASE.optimizer, precision=precision, optimizer=optimizer))


def whole(name: str, column: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Global values of a column, the same to every rank; exact in fp32."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {column}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def held_by_all(run: Run, axes: Axes) -> list[list[FragmentSpec]]:
    packing = packing_of(run.parallel, run.offload, axes.dp, nccl=False)

    def held(rank: int) -> list[FragmentSpec]:
        at = axes.coordinates(rank)
        return [piece for _, piece in owned_fragments(specs_of(run, at.pp, at.tp), axes, at, packing)]

    return [held(rank) for rank in range(axes.world_size)]


def body(
    rank: int, folder: str, run: Run, world: int, save: bool, config: CheckpointConfig
) -> tuple[list[Piece], float]:
    axes = Axes(run.parallel.pp, world // (run.parallel.tp * run.parallel.pp), 1, run.parallel.tp)
    grid = build_grid(axes)
    stages = build_stages(run, grid)
    state = ModelState(stages, grid, run.optimizer, run.parallel)
    initialise_state(state, 3)
    optimizer = ShardedOptimizer(state, run.optimizer, grid)
    checkpoints = Checkpoints(config, record_of(run), optimizer, lambda: held_by_all(run, axes), grid, "t")

    def expected(name: str, column: str, fragment: FragmentSpec) -> torch.Tensor:
        values = box_of(whole(name, column, fragment.spec.shape), fragment.spec).reshape(-1)
        return values[fragment.start : fragment.stop].double()

    if save:
        checkpoints.claim()
        for fragment in held_fragments(optimizer):
            for column, tensor in fragment.columns.items():
                tensor.copy_(expected(fragment.spec.name, column, fragment))
        optimizer.after_load()
        checkpoints.save(7, {"iteration": 7})
    else:
        found = checkpoints.find()
        assert found is not None
        checkpoints.load(found)
    differing = 0.0
    for fragment in held_fragments(optimizer):
        for column, tensor in fragment.columns.items():
            if column == "weight" or not config.no_load_optim:
                differing += (tensor.double() != expected(fragment.spec.name, column, fragment)).sum().item()
            else:
                differing += math.inf if tensor.any() else 0.0
    return values_of(stages), differing


HOME = (4, run_of(2, 2, 1, "bf16", 500, "adamw"))
AWAY = {
    "one": (1, run_of(1, 1, 0, "bf16", 10**7, "adamw")),
    "replicated": (4, run_of(1, 2, 0, "fp32", 300, "adamw")),
    "sharded": (3, run_of(1, 1, 2, "fp64", 700, "adam")),
    "wide": (4, run_of(4, 1, 1, "bf16", 1, "adamw")),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("saved")
    config = CheckpointConfig(save=str(folder))
    results = run_ranks(HOME[0], body, str(folder), HOME[1], HOME[0], True, config)
    assert [differing for _, differing in results] == [0.0] * HOME[0]
    return folder, assemble(pieces for pieces, _ in results)


@pytest.mark.slow
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("away", AWAY)
def test_loaded_elsewhere(saved, away, weights_only):
    folder, parameters = saved
    world, run = AWAY[away]
    config = CheckpointConfig(load=str(folder), no_load_optim=weights_only)
    results = run_ranks(world, body, str(folder), run, world, False, config)
    assert [differing for _, differing in results] == [0.0] * world
    found = assemble(pieces for pieces, _ in results)  # replicas of the tied embedding and over tp bitwise equal
    assert found.keys() == parameters.keys()
    for name, value in found.items():
        assert torch.equal(value, whole(name, "weight", tuple(value.shape)).to(value.dtype)), name
        assert torch.equal(value.bfloat16(), parameters[name]), name


@pytest.mark.slow
def test_sgd_and_adam_do_not_share_moments(saved):
    folder, _ = saved
    sgd = run_of(1, 1, 1, "fp32", 500, "sgd")
    with pytest.raises(RuntimeError, match="exp_avg_sq in the checkpoint, which this optimizer has not"):
        run_ranks(1, body, str(folder), sgd, 1, False, CheckpointConfig(load=str(folder)))
