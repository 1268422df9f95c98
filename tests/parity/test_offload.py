"""Optimizer state in host memory and on disks: every bit of a run is that of one with all state on the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import pytest
from torch import nn

from megazero.disk import swap
from megazero.disk.errors import DiskError
from megazero.zero.host_parts import SLOTS, HostParts
from tests.parameters import values_of
from tests.parity.test_late_update import FP16, UNTIED, Evaluations, Told, digest, saved, spoil
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

STEPS = 6
LATE = "--late-update"
HORIZONTAL = ["--micro-batch-order", "horizontal"]
BATCH = ["--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3", "--eval-iters", "1"]
SMALL = ["--nvme-buffer-bytes", "300KB"]
"""Parts of 1024 to 5120 elements: every bucket has several, and each slot is taken often."""


class Case(NamedTuple):
    """A layout and what leaves the device. infinite: steps in which a gradient is infinite."""

    ranks: int
    words: str
    offload: str
    infinite: tuple[int, ...] = ()


CASES = {
    "one rank, all in host memory": Case(1, FP16, "cpu", (2, 5)),
    "one rank, a share on disks": Case(1, f"--precision fp64 {LATE}", "nvme:0.35"),
    "one rank, sgd": Case(1, "--optimizer sgd --sgd-momentum 0.9 --precision bf16", "nvme"),
    "ZeRO-0": Case(2, "--precision bf16", "cpu:0.6"),
    "ZeRO-1, tied over two stages": Case(4, f"--pp 2 --zero-stage 1 {FP16} {LATE}", "nvme", (1, 4)),
    "ZeRO-1 in sets": Case(4, "--zero-stage 1 --zero-shard-size 2 --precision bf16", "nvme:0.7"),
    "ZeRO-1, no overlap, tp": Case(4, "--tp 2 --sequence-parallel --zero-stage 1 --no-overlap --precision fp32", "cpu"),
    "ZeRO-2, zb-h1, untied": Case(4, f"--pp 2 --zero-stage 2 --pipeline-schedule zb-h1 {UNTIED} {FP16}", "cpu", (3,)),
    "ZeRO-3, interleaved, dropout, late": Case(
        4,
        f"--pp 2 --virtual-stages 2 --num-layers 4 --zero-stage 3 --precision bf16 --hidden-dropout 0.1 {LATE}",
        "nvme:0.5",
    ),
    "int8 and int4 messages": Case(
        2, "--zero-stage 1 --zero-quantized-weights --zero-quantized-gradients int4 --precision fp32", "cpu:0.5"
    ),
}


def flags_of(corpus: Path, tmp_path: Path, words: str) -> list[str]:
    """In the same order of micro-batches wherever parameters rest, if `words` say nothing of it."""
    numbers = ["--train-iters", str(STEPS), "--clip-grad", "0.3", "--eval-interval", "3"]
    model = small_model(3, heads=6)
    return [*model, *HORIZONTAL, *BATCH, *numbers, *data_flags(corpus, tmp_path / "cache"), *words.split()]


def saving(folder: Path) -> list[str]:
    return ["--save", str(folder), "--save-interval", "2"]


def offloaded(folder: Path, what: str) -> list[str]:
    paths = ["--nvme-path", str(folder)] if what.startswith("nvme") else []
    return ["--offload-optimizer", what, *paths, *SMALL] if what != "none" else []


class Bits(NamedTuple):
    """What a run leaves on a rank. Its moments are in its checkpoints."""

    told: list[Told]
    weights: list[str]
    steps: float


def bits_on_rank(rank: int, size: int, flags: list[str], infinite: set[int], seed: int | None = None) -> Bits:
    """seed: of delays on every lane."""
    job, _ = job_on_rank(rank, size, flags)
    if seed is not None:
        delay(job.state.model.host, random.Random(1000 * seed + rank))
    told = Evaluations()
    job.trainer.log._sinks = (told,)
    if rank == size - 1:
        spoil(job, infinite)
    job.fit()
    with job.state.model.reading():
        weights = digest(piece.values for piece in values_of(nn.ModuleList(job.stages)))
    job.close()
    return Bits(told.told, weights, float(job.state.optimizer.step_count))


def delay(host: HostParts, chance: random.Random) -> None:
    """Have some of what lanes do take longer."""

    def slow(lane: Any) -> None:
        submit = lane.submit

        def after_a_while(work: Callable[..., Any], *rest: Any, **more: Any) -> Any:
            sleep(chance.choice((0, 0, 0.004)))
            return work(*rest, **more)

        lane.submit = lambda work, *rest, **more: submit(after_a_while, work, *rest, **more)

    for lane in (host.lanes.to_host._thread, host.lanes.to_device._thread, host.lanes.updates):
        slow(lane)


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", ["one rank, a share on disks", "ZeRO-1 in sets", "ZeRO-3, interleaved, dropout, late"])
def test_nothing_depends_on_how_fast_a_lane_is(name: str, corpus: Path, tmp_path: Path, seed: int) -> None:
    ranks, words, what, infinite = CASES[name]
    flags = [*flags_of(corpus, tmp_path, words), *offloaded(tmp_path, what)]
    plain, slowed = (run_ranks(ranks, bits_on_rank, ranks, flags, {*infinite}, each) for each in (None, seed))
    assert plain == slowed


def run(ranks: int, flags: list[str], save: Path, infinite: set[int]) -> list[Bits]:
    found: list[Bits] = run_ranks(ranks, bits_on_rank, ranks, [*flags, *saving(save)], infinite)
    return found


@pytest.mark.slow
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_that_of_a_run_without(name: str, corpus: Path, tmp_path: Path) -> None:
    """Losses, norms, weights, moments, skipped steps, saved files; and the folder is empty at the end."""
    ranks, words, what, infinite = CASES[name]
    flags, disks = flags_of(corpus, tmp_path, words), tmp_path / "disks"
    disks.mkdir()
    plain = run(ranks, flags, tmp_path / "plain", {*infinite})
    other = run(ranks, [*flags, *offloaded(disks, what)], tmp_path / "other", {*infinite})
    for own, theirs in zip(plain, other, strict=True):
        assert own == theirs
    assert sum(told.skipped for told in plain[0].told) >= len(infinite)
    assert saved(tmp_path / "plain") == saved(tmp_path / "other") != {}
    assert list(disks.iterdir()) == []


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize(("first", "then"), [("nvme:0.5", "none"), ("none", "nvme"), ("cpu", "nvme:0.8")])
def test_a_run_goes_on_from_another_tier(first: str, then: str, corpus: Path, tmp_path: Path) -> None:
    words = "--precision bf16"
    straight = run(1, flags_of(corpus, tmp_path, words), tmp_path / "straight", set())
    flags = flags_of(corpus, tmp_path, f"{words} --exit-interval 3")
    run(1, [*flags, *offloaded(tmp_path, first)], tmp_path / "first", set())
    flags = [*flags_of(corpus, tmp_path, words), "--load", str(tmp_path / "first")]
    resumed = run(1, [*flags, *offloaded(tmp_path, then)], tmp_path / "then", set())
    assert resumed[0].weights == straight[0].weights
    assert resumed[0].told == [told for told in straight[0].told if told.iteration > 3]


def parts_on_rank(rank: int, size: int, flags: list[str]) -> tuple[list[int], int, int]:
    """For each bucket its number of parts; turns of the slots in a run; bytes written to disks."""
    job, _ = job_on_rank(rank, size, flags)
    host = job.state.model.host
    job.fit()
    assert host.swap is not None
    job.close()
    return [len(parts) for parts in host.parts], host._turns, host.swap.bytes_written


@pytest.mark.slow
def test_the_slots_are_taken_in_turn_and_every_part_is_written(corpus: Path, tmp_path: Path) -> None:
    """Else the test of bits would prove little."""
    flags = [*flags_of(corpus, tmp_path, "--precision bf16"), *offloaded(tmp_path, "nvme")]
    ((parts, turns, written),) = run_ranks(1, parts_on_rank, 1, flags)
    assert min(parts) > SLOTS and turns == STEPS * sum(parts)
    elements = 12 * 1024 * (sum(parts) - len(parts))
    assert written > (1 + STEPS) * elements  # once when weights are made, and in every step


def failing_on_rank(rank: int, size: int, flags: list[str], after: int) -> tuple[str, int]:
    """What a run says whose disk is full after so many writes, and how many steps it has made."""
    job, _ = job_on_rank(rank, size, flags)
    moves, left = swap.run_moves, [after]

    def limited(transport: Any, write: bool, *rest: Any) -> list[int]:
        left[0] -= write
        if left[0] < 0:
            raise DiskError("no space is left")
        return moves(transport, write, *rest)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(DiskError) as error:
        patched.setattr(swap, "run_moves", limited)
        job.fit()
    job.close()
    return str(error.value), job.trainer.position.iteration


@pytest.mark.slow
def test_a_full_disk_in_a_step_is_an_error_and_the_last_checkpoint_is_good(corpus: Path, tmp_path: Path) -> None:
    flags, save = flags_of(corpus, tmp_path, "--precision bf16"), tmp_path / "save"
    straight = run(1, flags, tmp_path / "straight", set())
    there = [*flags, *offloaded(tmp_path, "nvme")]
    ((parts, *_),) = run_ranks(1, parts_on_rank, 1, there)
    ((said, steps),) = run_ranks(1, failing_on_rank, 1, [*there, *saving(save)], 3 * sum(parts) + 2)
    assert said.endswith("no space is left") and steps in (3, 4)
    assert not list(tmp_path.glob("megazero-swap-*"))
    resumed = run(1, [*there, "--load", str(save)], save, set())
    assert resumed[0].weights == straight[0].weights
