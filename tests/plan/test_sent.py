"""What ranks send in a step, counted where it is sent: the bytes are those of the plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.mpu.parameter import StateGroup
from megazero.plan.recompute import gathered_inputs
from megazero.plan.step_lists import StageLists
from megazero.plan.traffic import gathered_bytes
from megazero.program.traffic import traffic
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

VERTICAL = "--untie-embeddings-and-output-weights --micro-batch-order vertical --bucket-size 4000 --precision fp64"


class Sent(NamedTuple):
    """Bytes of a rank's gathers and reductions in a step.

    planned  what the banner says of the gathers
    forward, backward
             bytes of the parameters that the units of this rank read
    """

    gathered: int
    reduced: int
    planned: int
    forward: int
    backward: int
    gradients: int


def sent(rank: int, size: int, flags: list[str]) -> Sent:
    """The traffic of the second step."""
    job, _ = job_on_rank(rank, size, flags)
    model, group = job.state.model, job.grid.shared[StateGroup.REPLICAS].inner
    for _ in range(2):
        model.wait_parameters()
        group.traffic.clear()
        job.trainer.train_step(stop=False)
    model.wait_parameters()
    planned = gathered_bytes(StageLists(job.run, job.grid.axes, nccl=False), job.grid.at.pp)
    units = [unit for chunk in model.shape.units for unit in chunk]

    def of(name: str) -> int:
        return sum(count for (op, _), count in group.traffic.items() if op == name)

    return Sent(
        of("all_gather"),
        of("reduce_scatter"),
        0 if planned is None else planned.step,
        sum(model.shape.bytes_of(unit.forward) for unit in units),
        sum(model.shape.bytes_of(unit.backward) for unit in units),
        sum(bucket.gradient_bytes for bucket in model.shape.buckets),
    )


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("words", ["--zero-stage 3", "--pp 2 --zero-stage 3", "--zero-stage 2"])
def test_vertical_order_sends_the_same_for_any_number_of_micro_batches(
    words: str, corpus: Path, tmp_path: Path
) -> None:
    """Parameters travel at most once for forward and once for backward, gradients once."""
    ranks, steps = 4 if "--pp" in words else 2, list[list[Sent]]()
    model = [*small_model(4, heads=4), *VERTICAL.split(), *words.split(), "--global-batch-size", "56"]
    for accumulation in (1, 7):
        flags = [*model, "--micro-batch-size", str(28 // accumulation), *data_flags(corpus, tmp_path)]
        steps.append(run_ranks(ranks, sent, ranks, [*flags, "--train-iters", "4"]))
    assert steps[0] == steps[1]
    for of_rank in steps[0]:
        assert of_rank.reduced == of_rank.gradients
        if "3" not in words:
            assert of_rank.gathered == of_rank.gradients and of_rank.planned == 0  # an element of either takes 8 bytes
        else:
            assert of_rank.forward < of_rank.gathered == of_rank.planned <= of_rank.forward + of_rank.backward


def gathered_on_rank(rank: int, size: int, words: list[str]) -> int:
    job, _ = job_on_rank(rank, size, words)
    job.trainer.train_step(stop=False)
    job.state.model.wait_parameters()
    return sum(count for (name, _), count in job.trainer.grid.tp.traffic.items() if name == "all_gather")


def test_shared_inputs_of_recomputed_blocks(corpus: Path, tmp_path: Path) -> None:
    """Hidden states of 275 elements, which two ranks do not divide."""
    words = "--tp 2 --pp 2 --recompute-granularity full --recompute-num-layers 3 --global-batch-size 6 "
    words += (
        "--micro-batch-size 1 --train-iters 2 --hidden-size 25 --kv-channels 4 --ffn-hidden-size 96 --seq-length 11"
    )
    given, more = (
        [*small_model(4, heads=6), *words.split(), *data_flags(corpus, tmp_path)],
        ["--shard-recompute-inputs"],
    )
    without, shared = (run_ranks(4, gathered_on_rank, 4, flags) for flags in (given, [*given, *more]))
    run = parse_run([*given, *more], 4)
    planned = gathered_inputs(run, axes_of(run, 4), "cpu")
    assert planned == [6 * 276 * 2, 6 * 276 * 2], "one block of each stage, six micro-batches, one element of padding"
    assert [b - a for a, b in zip(without, shared, strict=True)] == [planned[0]] * 2 + [planned[1]] * 2


def blocks_on_rank(rank: int, size: int, words: list[str]) -> tuple[dict[tuple[str, torch.dtype], int], list[int], int]:
    """What replicas count in one step, the lengths of the buckets, and the bytes that the step's list says."""
    job, _ = job_on_rank(rank, size, words)
    listed = traffic(job.probe_engine.lists.training(4), job.state.model.shape)
    job.trainer.train_step(stop=False)
    job.state.model.wait_parameters()
    kinds = ("reduce_scatter", "all_to_all", "all_gather")
    counted = {key: count for key, count in job.trainer.grid.replicas.traffic.items() if key[0] in kinds}
    return counted, [bucket.layout.numel for bucket in job.state.model.buckets], sum(listed.values())


@pytest.mark.parametrize(("stage", "reduced", "gathered"), [(1, 1, 1), (2, 4, 1), (3, 4, None)])
def test_quantised_messages(stage: int, reduced: int, gathered: int | None, corpus: Path, tmp_path: Path) -> None:
    """Four micro-batches. Of fp16's bytes int8 is half and int4 a quarter; a scale of 4 bytes is shared by 256. Vectors
    are whole blocks, as in models of usual size.
    """
    layout = f"--zero-stage {stage} --precision bf16 --hidden-size 256 --ffn-hidden-size 256 --train-iters 4"
    words = [*small_model(2, heads=4), "--global-batch-size", "12", "--micro-batch-size", "1", *layout.split()]
    words += data_flags(corpus, tmp_path)
    exact, _, listed = run_ranks(3, blocks_on_rank, 3, words)[0]
    assert sum(exact.values()) == listed
    words += ["--zero-quantized-weights", "--zero-quantized-gradients", "int4", "--zero-gradient-error-feedback"]
    for counted, lengths, listed in run_ranks(3, blocks_on_rank, 3, words):
        assert sum(counted.values()) == listed
        parts = [numel // 3 for numel in lengths]
        codes = {bits: [math.ceil(math.ceil(n * bits / 8) / 16) * 16 for n in parts] for bits in (4, 8)}
        scales = [math.ceil(math.ceil(n / 256) * 4 / 16) * 16 for n in parts]
        wanted = {bits: 3 * (sum(codes[bits]) + sum(scales)) for bits in (4, 8)}
        assert counted["all_to_all", torch.uint8] == reduced * wanted[4]
        assert gathered is None or counted["all_gather", torch.uint8] == gathered * wanted[8]
        assert counted.keys() == {("all_to_all", torch.uint8), ("all_gather", torch.uint8)}
        assert 0.125 < counted["all_to_all", torch.uint8] / exact["reduce_scatter", torch.float32] < 0.131
        assert 0.5 < counted["all_gather", torch.uint8] / exact["all_gather", torch.bfloat16] < 0.515
