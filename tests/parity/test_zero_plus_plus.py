"""Trainings whose data-parallel messages are in blocks of int8 and int4 (--zero-quantized-*).

`train` itself asserts that replicas of a parameter are equal to the bit, and that all ranks launch in one order.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.program.traffic import traffic
from tests.parity.training import data_flags, job_on_rank, small_model, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

MODEL = [*small_model(2, heads=4), "--global-batch-size", "12", "--micro-batch-size", "1", "--lr", "1e-2"]


def flags(words: str, corpus: Path, cache: Path) -> list[str]:
    return [*MODEL, "--train-iters", "4", *words.split(), *data_flags(corpus, cache)]


INT4, INT8 = "--zero-quantized-gradients int4", "--zero-quantized-gradients int8"
ALL = f"--zero-quantized-weights {INT4} --zero-gradient-error-feedback"
LAYOUTS = {
    "ZeRO-0": (2, "--zero-stage 0 --precision fp32", INT4),
    "ZeRO-0, tied over two stages": (4, "--zero-stage 0 --precision fp32 --pp 2", INT8),
    "ZeRO-1": (3, "--zero-stage 1 --precision fp32", ALL),
    "ZeRO-1, fp64": (2, "--zero-stage 1 --precision fp64", f"--zero-quantized-weights {INT8}"),
    "ZeRO-2, tied over two stages": (4, "--zero-stage 2 --precision bf16 --pp 2", ALL),
    "ZeRO-3": (2, "--zero-stage 3 --precision bf16", ALL),
    "ZeRO-3, small parameters whole": (2, "--zero-stage 3 --precision fp32 --zero3-persist-below 100", ALL),
    "three sets of two, ZeRO-0": (6, "--zero-stage 0 --zero-shard-size 2 --precision fp32", INT8),
    "three sets of two, ZeRO-1": (6, "--zero-stage 1 --zero-shard-size 2 --precision bf16", ALL),
    "two sets of two, ZeRO-2": (4, "--zero-stage 2 --zero-shard-size 2 --precision fp16", ALL),
    "two sets of three, ZeRO-3": (6, "--zero-stage 3 --zero-shard-size 3 --precision fp32", ALL),
    "ZeRO-3 in a pipeline": (4, "--zero-stage 3 --precision fp32 --pp 2 --pipeline-schedule zb-h1", ALL),
}


@pytest.mark.sampled(cases=5)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_training_goes_nearly_as_the_exact_one(name: str, corpus: Path, tmp_path: Path) -> None:
    """Four steps."""
    size, layout, quantised = LAYOUTS[name]
    ours = train(size, flags(f"{layout} {quantised}", corpus, tmp_path))
    theirs = train(size, flags(layout, corpus, tmp_path))
    for a, b in zip(ours.records, theirs.records, strict=True):
        assert a.grad_norm is not None and b.grad_norm is not None and a.loss is not None and b.loss is not None
        assert math.isclose(a.loss, b.loss, rel_tol=0.02) and math.isclose(a.grad_norm, b.grad_norm, rel_tol=0.1)
        assert a.grad_norm != b.grad_norm


def test_replicas_over_tp_arrive_alike(corpus: Path, tmp_path: Path) -> None:
    """`train` asserts it. A tp rank's weights that are larger than a norm's would set the scale of a block of both."""
    words = f"--tp 2 --zero-stage 1 --precision fp32 --init-method-std 1 --train-iters 2 {ALL}"
    assert len(train(4, flags(words, corpus, tmp_path)).records) == 2


def bytes_of_a_step(
    rank: int, size: int, words: list[str]
) -> tuple[dict[tuple[str, torch.dtype], int], list[int], int]:
    """What the neighbours count in one step, the lengths of the buckets, and the bytes that the step's list says."""
    job, _ = job_on_rank(rank, size, words)
    listed = traffic(job.probe_engine.lists.training(4), job.state.model.shape)
    job.trainer.train_step(stop=False)
    job.state.model.wait_parameters()
    kinds = ("reduce_scatter", "all_to_all", "all_gather")
    found = {key: count for key, count in job.trainer.grid.replicas.traffic.items() if key[0] in kinds}
    return found, [bucket.layout.numel for bucket in job.state.model.buckets], sum(listed.values())


@pytest.mark.parametrize(("stage", "sent", "gathered"), [(1, 1, 1), (2, 4, 1), (3, 4, None)])
def test_the_bytes_of_a_step_are_those_of_the_formula(
    stage: int, sent: int, gathered: int | None, corpus: Path, tmp_path: Path
) -> None:
    """Four micro-batches. Of fp16's bytes int8 is half and int4 a quarter; a scale of 4 bytes is shared by 256. Vectors
    are whole blocks, as in models of usual size.
    """
    layout = f"--zero-stage {stage} --precision bf16 --hidden-size 256 --ffn-hidden-size 256"
    exact, _, listed = run_ranks(3, bytes_of_a_step, 3, flags(layout, corpus, tmp_path))[0]
    assert sum(exact.values()) == listed
    words = flags(f"{layout} {ALL}", corpus, tmp_path)
    for sent_bytes, lengths, listed in run_ranks(3, bytes_of_a_step, 3, words):
        assert sum(sent_bytes.values()) == listed
        parts = [numel // 3 for numel in lengths]
        codes = {bits: [math.ceil(math.ceil(n * bits / 8) / 16) * 16 for n in parts] for bits in (4, 8)}
        scales = [math.ceil(math.ceil(n / 256) * 4 / 16) * 16 for n in parts]
        wanted = {bits: 3 * (sum(codes[bits]) + sum(scales)) for bits in (4, 8)}
        assert sent_bytes["all_to_all", torch.uint8] == sent * wanted[4]
        assert gathered is None or sent_bytes["all_gather", torch.uint8] == gathered * wanted[8]
        assert sent_bytes.keys() == {("all_to_all", torch.uint8), ("all_gather", torch.uint8)}
        assert 0.125 < sent_bytes["all_to_all", torch.uint8] / exact["reduce_scatter", torch.float32] < 0.131
        assert 0.5 < sent_bytes["all_gather", torch.uint8] / exact["all_gather", torch.bfloat16] < 0.515


RESUMED = {
    "ZeRO-1": "--zero-stage 1 --precision fp32",
    "ZeRO-2 with overflows": "--zero-stage 2 --precision fp16 --initial-loss-scale 1.6e7 --hysteresis 1",
    "ZeRO-3": "--zero-stage 3 --precision bf16",
}


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_repeats_the_metrics(name: str, corpus: Path, tmp_path: Path) -> None:
    """Checkpoints have the exact weights, and a gather after a skipped step is the one before it."""
    words = f"{RESUMED[name]} --zero-quantized-weights {INT4} --train-iters 8"
    whole = train(2, flags(words, corpus, tmp_path))
    saves = f"{words} --save {tmp_path / 'saved'} --save-interval 3"
    train(2, flags(f"{saves} --exit-interval 3", corpus, tmp_path))
    resumed = train(2, flags(f"{saves} --load {tmp_path / 'saved'}", corpus, tmp_path))
    assert len(resumed.records) == 5
    assert [str((r.loss, r.grad_norm)) for r in whole.records[3:]] == [
        str((r.loss, r.grad_norm)) for r in resumed.records
    ]
    skipped = sum(record.skipped for record in whole.records)
    assert (0 < skipped < 6) == ("overflows" in name), skipped


def overflowing(rank: int, words: list[str]) -> tuple[list[bool], bool, float, float]:
    """(steps that were skipped, whether weights are as before, the largest that is kept, and what the next step keeps
    of it)
    """
    job, recorder = job_on_rank(rank, 2, words)
    model = job.state.model
    before = [model.weights.held(index).clone() for index in range(len(model.buckets))]
    job.fit()
    same = all(torch.equal(model.weights.held(index), old) for index, old in enumerate(before))

    def largest() -> float:
        return max(lost.abs().max().item() for pair in model.messages._kept for lost in pair if lost is not None)

    kept = largest()
    model.messages.begin_step(torch.tensor(1.0))
    return [bool(r.skipped) for r in recorder.records], same, kept, largest()


def test_an_overflow_is_skipped_everywhere_and_nothing_of_it_is_kept(corpus: Path, tmp_path: Path) -> None:
    """Some blocks overflow. What the others lost is of gradients that nobody uses."""
    words = flags(f"--zero-stage 2 --precision fp16 --initial-loss-scale 1e9 --hysteresis 1 {ALL}", corpus, tmp_path)
    for skipped, same, kept, left in run_ranks(2, overflowing, words):
        assert skipped == [True] * 4 and same and 0.0 < kept < math.inf and left == 0.0


def test_the_start_of_a_step_rescales_what_is_kept(corpus: Path, tmp_path: Path) -> None:
    """Two good steps around one at which the loss scale grows: what is kept grows with it."""
    words = f"--zero-stage 1 --precision fp16 --initial-loss-scale 64 {ALL} --train-iters 3"
    steady = run_ranks(2, overflowing, flags(f"{words} --loss-scale-window 100", corpus, tmp_path))
    grown = run_ranks(2, overflowing, flags(f"{words} --loss-scale-window 2", corpus, tmp_path))
    for (skipped, _, small, _), (_, _, large, _) in zip(steady, grown, strict=True):
        assert not any(skipped) and large == pytest.approx(2 * small, rel=0.02)


def own_weights(rank: int, words: list[str]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each bucket: this rank's exact weights, those that all ranks read there, and the former after reading."""
    job, _ = job_on_rank(rank, 2, words)
    job.fit()
    model = job.state.model
    exact = [model.weights.shard(index).clone() for index in range(len(model.buckets))]
    with model.reading():
        read = [
            model.parameters[index].whole[slice(*bucket.shard)].clone() for index, bucket in enumerate(model.buckets)
        ]
    after = [model.weights.shard(index).clone() for index in range(len(model.buckets))]
    return list(zip(exact, read, after, strict=True))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_weights_that_are_updated_stay_exact(stage: int, corpus: Path, tmp_path: Path) -> None:
    words = flags(f"--zero-stage {stage} --precision fp32 --zero-quantized-weights", corpus, tmp_path)
    for buckets in run_ranks(2, own_weights, words):
        for exact, read, after in buckets:
            assert torch.equal(exact, after) and not torch.equal(exact, read)
            steps = torch.cat([block.abs().max().expand_as(block) / 127 for block in exact.split(256)])
            assert ((read - exact).abs() <= 0.5001 * steps).all()


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("more", ["", "--zero-gradient-error-feedback"])
def test_three_hundred_steps_learn_as_much(more: str, corpus: Path, tmp_path: Path) -> None:
    """With error feedback the loss is that of the exact run; without it, it may be lower too."""
    words = "--zero-stage 1 --precision bf16 --train-iters 300 --micro-batch-size 6"
    quantised = f"{words} --zero-quantized-weights {INT4} {more}"
    ours, theirs = (train(2, flags(each, corpus, tmp_path)).records for each in (quantised, words))
    means = [sum(record.loss or math.nan for record in records[-20:]) / 20 for records in (ours, theirs)]
    assert theirs[0].loss is not None and means[1] < 0.8 * theirs[0].loss, "nothing was learnt"
    assert means[0] < 1.01 * means[1] and (not more or means[0] > 0.99 * means[1]), means
