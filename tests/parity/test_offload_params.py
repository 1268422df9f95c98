"""Parameters in host memory and on disks: every number of a run is that of one with all parameters on the device.

Buckets of parameters that are brought for each use hold one unit, as with ZeRO-3, and the norm is a sum over buckets.
So runs of ZeRO-3 are the same to the bit, on one rank too. Those of other stages have other buckets without: they are
the same up to the rounding of sums.
"""

from __future__ import annotations

from pathlib import Path
from threading import current_thread
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megazero.config.tiers import SLOTS
from tests.parameters import values_of
from tests.parity.test_late_update import FP16, UNTIED, saved
from tests.parity.test_offload import BATCH, HORIZONTAL, LATE, SMALL, STEPS, bits_on_rank, flags_of, saving
from tests.parity.training import data_flags, job_on_rank, train
from tests.ranks import run_ranks


class Case(NamedTuple):
    """A layout and what leaves the device. infinite: steps in which a gradient is infinite."""

    ranks: int
    words: str
    offload: str
    infinite: tuple[int, ...] = ()


CASES = {
    "one rank, in host memory": Case(1, f"--zero-stage 3 {FP16}", "--offload-params cpu", (2, 5)),
    "one rank, on disks, all of it": Case(
        1, f"--zero-stage 3 --precision bf16 {LATE}", "--offload-params nvme --offload-optimizer nvme", ()
    ),
    "one rank, fp16, both on disks": Case(
        1, f"--zero-stage 3 {FP16}", "--offload-params nvme --offload-optimizer nvme:0.6", (2, 5)
    ),
    "one rank, a share, fp64": Case(
        1, "--zero-stage 3 --precision fp64", "--offload-params cpu:0.4 --offload-optimizer cpu"
    ),
    "ZeRO-3": Case(2, "--precision bf16 --zero-stage 3", "--offload-params cpu --offload-optimizer cpu"),
    "ZeRO-3 in sets, tp, late": Case(
        4, f"--tp 2 --sequence-parallel --zero-stage 3 --precision fp32 {LATE}", "--offload-params nvme:0.7"
    ),
    "ZeRO-3, zb-h1, untied": Case(
        4,
        f"--pp 2 --zero-stage 3 --pipeline-schedule zb-h1 {UNTIED} {FP16}",
        "--offload-params nvme --offload-optimizer cpu:0.5",
        (3,),
    ),
    "ZeRO-3, interleaved, dropout, vertical": Case(
        4,
        "--pp 2 --virtual-stages 2 --num-layers 4 --zero-stage 3 --precision bf16 --hidden-dropout 0.1 "
        "--micro-batch-order vertical",
        "--offload-params nvme --offload-optimizer nvme",
    ),
    "ZeRO-3, int8 weights": Case(
        2, "--zero-stage 3 --zero-quantized-weights --precision fp32 --no-overlap", "--offload-params cpu"
    ),
}


STAGES = {
    "one rank": Case(1, "", "--offload-params cpu"),
    "ZeRO-0, late, a share": Case(2, LATE, "--offload-params cpu:0.6 --offload-optimizer nvme:0.5"),
    "ZeRO-0, tied over two stages": Case(4, "--pp 2", "--offload-params nvme"),
    "ZeRO-1, tied over two stages": Case(4, f"--pp 2 --zero-stage 1 {LATE}", "--offload-params nvme"),
    "ZeRO-1, tp": Case(4, "--tp 2 --sequence-parallel --zero-stage 1", "--offload-params cpu --offload-optimizer cpu"),
    "ZeRO-1 in sets": Case(
        4, "--zero-stage 1 --zero-shard-size 2", "--offload-params nvme:0.5 --offload-optimizer cpu"
    ),
    "ZeRO-2": Case(2, "--zero-stage 2", "--offload-params nvme --offload-optimizer nvme"),
    "ZeRO-2, vertical": Case(
        2, "--zero-stage 2 --micro-batch-order vertical --vertical-group-size 2", "--offload-params cpu"
    ),
}
"""In fp64."""


ADAPTERS = {
    "one rank": Case(1, "", "--offload-params cpu"),
    "codes on disks": Case(1, "--lora-base-bits 4 --precision bf16", "--offload-params nvme"),
    "ZeRO-0, codes, a share": Case(2, "--lora-base-bits 8 --precision bf16", "--offload-params cpu:0.5"),
    "ZeRO-3, codes": Case(2, f"--zero-stage 3 --lora-base-bits 4 --precision bf16 {LATE}", "--offload-params nvme"),
    "ZeRO-3, all on disks": Case(2, "--zero-stage 3", "--offload-params nvme --offload-optimizer nvme"),
    "ZeRO-2": Case(2, "--zero-stage 2 --precision fp64", "--offload-params cpu --offload-optimizer cpu"),
}


def flags_for(what: str, disks: Path) -> list[str]:
    parts = SMALL if "nvme" in what or "--offload-optimizer" in what else []
    return [*what.split(), *parts, *(["--nvme-path", str(disks)] if "nvme" in what else [])]


def numbers_on_rank(rank: int, size: int, flags: list[str]) -> tuple[list[float], list[Tensor]]:
    """Loss and norm of every step, and the final weights."""
    job, recorder = job_on_rank(rank, size, flags)
    job.fit()
    with job.state.model.reading():
        weights = [piece.values.clone() for piece in values_of(nn.ModuleList(job.stages))]
    job.close()
    return [number for record in recorder.records for number in (record.loss, record.grad_norm)], weights


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("name", STAGES)
def test_other_stages_have_the_same_numbers(name: str, corpus: Path, tmp_path: Path) -> None:
    ranks, words, what, _ = STAGES[name]
    flags = flags_of(corpus, tmp_path, f"--precision fp64 {words}")
    plain, other = (
        run_ranks(ranks, numbers_on_rank, ranks, [*flags, *more]) for more in ([], flags_for(what, tmp_path))
    )
    for (own, weights), (theirs, other_weights) in zip(plain, other, strict=True):
        assert theirs == pytest.approx(own, rel=1e-12) and len(own) == 2 * STEPS and own[0] != own[2]
        for one, another in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(another, one, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_that_of_a_run_without(name: str, corpus: Path, tmp_path: Path) -> None:
    """Losses, norms, weights, moments, skipped steps, saved files; and the folder is empty at the end."""
    ranks, words, what, infinite = CASES[name]
    flags, disks = flags_of(corpus, tmp_path, words), tmp_path / "disks"
    disks.mkdir()
    there = flags_for(what, disks)
    plain, other = (
        run_ranks(ranks, bits_on_rank, ranks, [*flags, *more, *saving(tmp_path / folder)], {*infinite})
        for folder, more in (("plain", []), ("other", there))
    )
    for own, theirs in zip(plain, other, strict=True):
        assert own == theirs
    assert sum(told.skipped for told in plain[0].told) >= len(infinite)
    assert saved(tmp_path / "plain") == saved(tmp_path / "other") != {}
    assert list(disks.iterdir()) == []


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to which adapters are added."""
    folder = tmp_path_factory.mktemp("base")
    train(1, [*flags_of(corpus, folder, "--train-iters 1"), "--save", str(folder / "base")])
    return folder / "base"


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_frozen_base_rests_there_too(name: str, base: Path, corpus: Path, tmp_path: Path) -> None:
    """And what is generated from it at the end is the same."""
    ranks, words, what, _ = ADAPTERS[name]
    data = [*data_flags(corpus, tmp_path / "cache"), "--seq-length", "12", "--train-iters", str(STEPS), *BATCH]
    flags = ["--init-from", str(base), "--lora-rank", "2", *HORIZONTAL, *data, *words.split()]
    plain, other = (
        run_ranks(ranks, numbers_on_rank, ranks, [*flags, *more]) for more in ([], flags_for(what, tmp_path))
    )
    for (own, weights), (theirs, other_weights) in zip(plain, other, strict=True):
        assert theirs == pytest.approx(own, rel=1e-6) and len({*own}) == 2 * STEPS
        for one, another in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(another, one)


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", ["one rank, on disks, all of it", "ZeRO-3, zb-h1, untied"])
def test_nothing_depends_on_how_fast_a_lane_is(name: str, corpus: Path, tmp_path: Path, seed: int) -> None:
    ranks, words, what, infinite = CASES[name]
    flags = [*flags_of(corpus, tmp_path, words), *flags_for(what, tmp_path)]
    plain, slowed = (run_ranks(ranks, bits_on_rank, ranks, flags, {*infinite}, each) for each in (None, seed))
    assert plain == slowed


def test_the_program_goes_on_while_parameters_are_updated_and_loaded(corpus: Path, tmp_path: Path) -> None:
    """What a load waits for is waited for on its lane; the program waits where it reads them."""
    job, _ = job_on_rank(0, 1, [*flags_of(corpus, tmp_path, "--precision bf16"), "--offload-params", "cpu"])
    model, waiting = job.state.model, list[str]()
    model.host._arriving[1].append(lambda: waiting.append(current_thread().name))
    model.actions.load(1, -1)
    model.actions.gather(1)
    model.actions.ready([0])
    assert current_thread().name not in waiting
    model.actions.ready([1])
    assert waiting[0].startswith("to-device") and model.host.arriving(1) == ()
    model.actions.release(1)
    job.close()


def test_a_slot_is_not_taken_twice(corpus: Path, tmp_path: Path) -> None:
    """Parts are read into a few slots. One more would overwrite the first, which nobody has loaded."""
    words = f"--precision bf16 --offload-params nvme --nvme-path {tmp_path} --nvme-buffer-bytes 100KB"
    job, _ = job_on_rank(0, 1, flags_of(corpus, tmp_path, words))
    resting = job.state.model.resting
    for part in range(SLOTS):
        resting.read((0, part))
    with pytest.raises(AssertionError, match="bucket 0, part 0: parameters has not been loaded"):
        resting.read((0, SLOTS))
    job.close()


@pytest.mark.slow
def test_a_run_goes_on_with_other_tiers(corpus: Path, tmp_path: Path) -> None:
    """From parameters on disks to half of them in host memory, and to none."""
    flags = flags_of(corpus, tmp_path, "--zero-stage 3 --precision bf16")
    straight = run_ranks(1, bits_on_rank, 1, [*flags, *saving(tmp_path / "straight")], set())
    first = [*flags_for("--offload-params nvme --offload-optimizer nvme:0.5", tmp_path), "--exit-interval", "3"]
    run_ranks(1, bits_on_rank, 1, [*flags, *first, *saving(tmp_path / "first")], set())
    for then in ("--offload-params cpu:0.5", ""):
        more = [*flags_for(then, tmp_path)] if then else []
        resumed = run_ranks(1, bits_on_rank, 1, [*flags, *more, "--load", str(tmp_path / "first")], set())
        assert resumed[0].weights == straight[0].weights
        assert resumed[0].told == [told for told in straight[0].told if told.iteration > 3]
