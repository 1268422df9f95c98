"""A model is made shard by shard: what building takes at most, seen by torch's allocator."""

from collections.abc import Collection, Mapping

import pytest
import torch

from fused_ops.blocks import block_elements
from megazero.config.parse import parse_run
from megazero.config.schema import ParallelConfig
from megazero.config.tiers import Tier
from megazero.disk.opening import open_swap
from megazero.disk.store import Store
from megazero.mpu.axes import Coordinates, axes_of
from megazero.mpu.grid import Group, ProcessGrid, StateGroups, single_process_grid
from megazero.mpu.parameter import StateGroup, spec_of
from megazero.pipeline.build import build_stages
from megazero.zero.portions import initialise_state
from megazero.zero.state import ModelState
from tests.plan.meter import metered

SHAPE = "--num-layers 12 --hidden-size 256 --num-attention-heads 4 --seq-length 16 --vocab-size 3000"
CONSTANT = 52 * block_elements(torch.device("cpu"))
"""Bytes for what is not a parameter: a block of initial values while it is drawn, in float64 with its random bits."""


def grid_of(rank: int, size: int, axes) -> ProcessGrid:
    """The grid of one of `size` replicas, without processes: nothing that is built here communicates."""
    grid = single_process_grid()
    replicas = Group(tuple(range(size)), rank, None)
    grid.axes, grid.rank, grid.at, grid.replicas = axes, rank, Coordinates(0, rank, 0, 0), replicas
    grid.shared = dict.fromkeys(StateGroup, StateGroups(replicas, Group((rank,), 0, None)))
    return grid


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rank", [0, 3])
def test_building_with_sharded_parameters_takes_the_shards_alone(rank, precision):
    run = parse_run([*SHAPE.split(), "--zero-stage", "3", "--precision", precision, "--global-batch-size", "8"], 4)
    grid = grid_of(rank, 4, axes_of(run, 4))

    def build() -> ModelState:
        state = ModelState(build_stages(run, grid, allocate=False), grid, run.optimizer, run.parallel)
        initialise_state(state, 7)
        return state

    state, taken = metered(build)
    held = sum(state.bytes().values())
    assert held <= taken.left <= held + CONSTANT
    assert taken.peak <= held + CONSTANT


def test_master_weights_are_not_those_of_16_bits():
    """They are drawn as those of a run in fp32, and only the parameters are rounded."""
    words = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 300 --precision"
    weights = {}
    for precision in ("fp32", "bf16"):
        run = parse_run([*words.split(), precision], 1)
        grid = single_process_grid()
        state = ModelState(build_stages(run, grid, allocate=False), grid, run.optimizer, run.parallel)
        initialise_state(state, 7)
        weights[precision] = torch.cat([state.weights.held(index) for index in range(len(state.buckets))])
    assert torch.equal(weights["bf16"], weights["fp32"])
    assert not torch.equal(weights["bf16"], weights["bf16"].bfloat16().float())


@pytest.mark.slow
def test_state_on_disks_is_initialised_part_by_part(tmp_path):
    """Its embedding alone, in fp32, is larger than the bound leaves room for."""
    words = "--zero-stage 3 --precision bf16 --offload-optimizer nvme --offload-params nvme --offload-gradients nvme"
    small = ["--nvme-path", str(tmp_path), "--nvme-buffer-bytes", "4MB", "--vocab-size", "24000"]
    run = parse_run([*SHAPE.split(), *words.split(), *small], 1)
    grid = single_process_grid()

    def opened(pieces: Mapping[Tier, Mapping[str, int]], again: Collection[str]) -> Mapping[Tier, Store]:
        return {Tier.DISK: open_swap([tmp_path], pieces[Tier.DISK], job="job", rank=0, slots=1)}

    stages = build_stages(run, grid, allocate=False)
    state = ModelState(stages, grid, run.optimizer, run.parallel, offload=run.offload, open_stores=opened)
    _, taken = metered(lambda: initialise_state(state, 7))
    embedding = max(p.numel() for bucket in state.buckets for p in bucket.parameters)
    part = max(stop - start for rests in state.resting for start, stop, _ in rests.parts)
    with state.reading():
        found = [p.detach().clone() for bucket in state.buckets for p in bucket.parameters]
    state.tiers.close()
    alone = ModelState(build_stages(run, grid, allocate=False), grid, run.optimizer, ParallelConfig(device="cpu"))
    initialise_state(alone, 7)
    wanted = {spec_of(p).name: p for bucket in alone.buckets for p in bucket.parameters}
    names = [spec_of(p).name for bucket in state.buckets for p in bucket.parameters]
    assert all(torch.equal(p, wanted[name]) for name, p in zip(names, found, strict=True))
    assert taken.peak <= CONSTANT + 2 * part
    assert 4 * embedding > 2 * (CONSTANT + 2 * part), "the bound says much"


def test_an_array_of_a_whole_parameter_is_refused_in_words():
    """Its memory could not be freed any more, and the next release would fail in torch."""
    run = parse_run([*SHAPE.split(), "--zero-stage", "3", "--precision", "fp32", "--global-batch-size", "8"], 4)
    grid = grid_of(0, 4, axes_of(run, 4))
    state = ModelState(build_stages(run, grid, allocate=False), grid, run.optimizer, run.parallel)
    norm = state.gatherer.parameters[1]
    assert norm.gathered and len(norm.bucket.parameters) > 1
    for copied in (True, False):
        norm.allocate()
        parameter = norm.bucket.parameters[-1].detach()
        array = (parameter.clone() if copied else parameter).numpy()
        if copied:
            norm.free()
    named = r"one of the \d+ parameters from embedding.norm.weight to embedding.norm.bias cannot be freed: .*numpy"
    with pytest.raises(RuntimeError, match=named):
        norm.free()
    assert array.size == parameter.numel()
