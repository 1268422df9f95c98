"""Gradients summed in host memory and on disks: every number of a run is that of one with all of them on the device.

ZeRO-2 and 3 sum in the same order then: a reduction for each micro-batch, added to the shard. So every bit is equal. On
disks the norm alone is a sum of parts, equal up to its last bits. Other stages sum in another order, and hybrid shards
and partial sums over tp do: they are equal in fp64 up to rounding, and equal to one process.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megazero.disk.errors import SwapDamaged
from tests.parity.test_late_update import FP16, UNTIED, saved
from tests.parity.test_offload import BATCH, HORIZONTAL, LATE, SMALL, STEPS, bits_on_rank, flags_of, saving
from tests.parity.test_offload_params import numbers_on_rank
from tests.parity.training import data_flags, job_on_rank, train
from tests.ranks import run_ranks


class Case(NamedTuple):
    """A layout and what leaves the device. infinite: steps in which a gradient is infinite."""

    ranks: int
    words: str
    offload: str
    infinite: tuple[int, ...] = ()


VERTICAL = "--micro-batch-order vertical"
CASES = {
    "one rank, ZeRO-3": Case(1, f"--zero-stage 3 {FP16}", "--offload-gradients cpu", (2, 5)),
    "ZeRO-3": Case(2, f"--zero-stage 3 {FP16}", "--offload-gradients cpu --offload-optimizer cpu", (2, 5)),
    "ZeRO-2, updated on the device, late": Case(
        2, f"--zero-stage 2 --precision bf16 --bucket-size 6000 {LATE}", "--offload-gradients cpu"
    ),
    "ZeRO-2, shares, no overlap": Case(
        2,
        "--zero-stage 2 --precision fp32 --bucket-size 6000 --no-overlap",
        "--offload-gradients cpu:0.5 --offload-optimizer cpu:0.4",
    ),
    "ZeRO-2, bf16 messages": Case(
        2, "--zero-stage 2 --precision bf16 --grad-reduce-dtype bf16", "--offload-gradients cpu --offload-optimizer cpu"
    ),
    "ZeRO-3, zb-h1, untied, parameters too": Case(
        4,
        f"--pp 2 --zero-stage 3 --pipeline-schedule zb-h1 {UNTIED} {FP16}",
        "--offload-gradients cpu --offload-params cpu --offload-optimizer cpu:0.5",
        (3,),
    ),
    "ZeRO-3, vertical, int8": Case(
        2,
        f"--zero-stage 3 --precision bf16 --zero-quantized-gradients int8 {VERTICAL} --vertical-group-size 2",
        "--offload-gradients cpu",
    ),
    "ZeRO-2, sgd": Case(
        2, "--zero-stage 2 --precision fp32 --optimizer sgd --sgd-momentum 0.9", "--offload-gradients cpu"
    ),
}
DISKS = {
    "one rank, all on disks": Case(
        1,
        f"--zero-stage 3 {FP16}",
        "--offload-gradients nvme --offload-params nvme --offload-optimizer nvme",
        (2, 5),
    ),
    "ZeRO-2, late, a share": Case(
        2, f"--zero-stage 2 --precision bf16 --bucket-size 6000 {LATE}", "--offload-gradients nvme:0.6"
    ),
    "ZeRO-3, updated in host memory": Case(
        2, f"--zero-stage 3 --precision bf16 {VERTICAL} {LATE}", "--offload-gradients nvme --offload-optimizer cpu"
    ),
    "ZeRO-2, whole steps": Case(
        2,
        "--zero-stage 2 --precision bf16",
        "--offload-gradients nvme --offload-optimizer nvme:0.6 --nvme-checkpoint",
    ),
}
STAGES = {
    "one rank, ZeRO-0": Case(1, "", "--offload-gradients cpu"),
    "ZeRO-0, a share, late": Case(2, f"{LATE} --bucket-size 6000", "--offload-gradients cpu:0.5"),
    "ZeRO-0 in sets": Case(4, "--zero-shard-size 2", "--offload-gradients nvme --offload-optimizer cpu"),
    "ZeRO-0, int4": Case(2, f"--zero-quantized-gradients int4 --precision fp32 {VERTICAL}", "--offload-gradients cpu"),
    "ZeRO-0, tied over two stages": Case(4, "--pp 2", "--offload-gradients nvme"),
    "ZeRO-1, tied over two stages, late": Case(
        4, f"--pp 2 --zero-stage 1 {LATE}", "--offload-gradients cpu --offload-optimizer nvme:0.5"
    ),
    "ZeRO-1, tp": Case(4, "--tp 2 --sequence-parallel --zero-stage 1", "--offload-gradients cpu --offload-params cpu"),
    "ZeRO-1 in sets": Case(
        4, "--zero-stage 1 --zero-shard-size 2", "--offload-gradients nvme:0.7 --offload-optimizer cpu"
    ),
    "ZeRO-2, interleaved": Case(
        4, "--pp 2 --virtual-stages 2 --num-layers 4 --zero-stage 2", "--offload-gradients cpu"
    ),
    "ZeRO-2, gpipe": Case(
        2,
        "--pp 2 --virtual-stages 2 --num-layers 4 --pipeline-schedule gpipe --zero-stage 2",
        "--offload-gradients cpu",
    ),
    "ZeRO-3, tied over two stages, in sets": Case(
        4, "--pp 2 --zero-stage 3 --zero-shard-size 1", "--offload-gradients nvme --offload-optimizer nvme"
    ),
    "ZeRO-3, tied, tp": Case(4, "--pp 2 --tp 2 --sequence-parallel --zero-stage 3", "--offload-gradients cpu"),
    "ZeRO-3 in sets, tp": Case(
        4, f"--tp 2 --sequence-parallel --zero-stage 3 {VERTICAL}", "--offload-gradients nvme --offload-params nvme"
    ),
    "one micro-batch": Case(2, "--zero-stage 2 --global-batch-size 2 --micro-batch-size 1", "--offload-gradients nvme"),
}
"""In fp64. Messages of int4 lose bits in each reduction: of them there is one in vertical order, as without."""


def flags_for(what: str, disks: Path) -> list[str]:
    return [*what.split(), *SMALL, *(["--nvme-path", str(disks)] if "nvme" in what else [])]


@pytest.mark.slow
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_that_of_a_run_without(name: str, corpus: Path, tmp_path: Path) -> None:
    """Losses, norms, weights, moments, skipped steps, saved files."""
    ranks, words, what, infinite = CASES[name]
    flags = flags_of(corpus, tmp_path, words)
    plain, other = (
        run_ranks(ranks, bits_on_rank, ranks, [*flags, *more, *saving(tmp_path / folder)], {*infinite})
        for folder, more in (("plain", []), ("other", flags_for(what, tmp_path)))
    )
    for own, theirs in zip(plain, other, strict=True):
        assert own == theirs
    assert sum(told.skipped for told in plain[0].told) >= len(infinite)
    assert saved(tmp_path / "plain") == saved(tmp_path / "other") != {}


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("name", DISKS)
def test_on_disks_the_norm_alone_is_rounded_otherwise(name: str, corpus: Path, tmp_path: Path) -> None:
    """Without clipping it changes nothing else: weights and skipped steps are the same; and the folder is empty at the
    end, unless it keeps whole steps.
    """
    ranks, words, what, infinite = DISKS[name]
    flags, disks = [*flags_of(corpus, tmp_path, words), "--clip-grad", "0"], tmp_path / "disks"
    disks.mkdir()
    plain, other = (
        run_ranks(ranks, bits_on_rank, ranks, [*flags, *more], {*infinite}) for more in ([], flags_for(what, disks))
    )
    for own, theirs in zip(plain, other, strict=True):
        assert own.weights == theirs.weights and own.steps == theirs.steps
        for one, another in zip(own.told, theirs.told, strict=True):
            numbers = [
                [float(x) for x in re.findall(r"[-\d.]+(?:e[-+]\d+)?|inf|nan", each.numbers)] for each in (one, another)
            ]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-14, nan_ok=True) and one.skipped == another.skipped
    assert sum(told.skipped for told in plain[0].told) >= len(infinite)
    assert list(disks.iterdir()) == [] or "checkpoint" in what


@pytest.mark.slow
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("name", STAGES)
def test_other_sums_have_the_same_numbers(name: str, corpus: Path, tmp_path: Path) -> None:
    """Losses and norms are those of one process; weights those of the same layout without the flag."""
    ranks, words, what, _ = STAGES[name]
    flags = flags_of(corpus, tmp_path, f"--precision fp64 {words}")
    plain, other = (
        run_ranks(ranks, numbers_on_rank, ranks, [*flags, *more]) for more in ([], flags_for(what, tmp_path))
    )
    for (own, weights), (theirs, other_weights) in zip(plain, other, strict=True):
        assert theirs == pytest.approx(own, rel=1e-9)
        assert len(own) == 2 * STEPS and own[0] != own[2]
        for one, another in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(another, one, rtol=1e-9, atol=1e-12)
    if "int4" not in name:
        layers = re.findall(r"--num-layers \d+|--global-batch-size \d+", words)
        (alone,) = run_ranks(1, numbers_on_rank, 1, flags_of(corpus, tmp_path, f"--precision fp64 {' '.join(layers)}"))
        assert other[0][0] == pytest.approx(alone[0], rel=1e-9)


ADAPTERS = {
    "ZeRO-0": Case(2, "--precision fp64", "--offload-gradients cpu"),
    "ZeRO-3, codes, all on disks": Case(
        2,
        f"--zero-stage 3 --lora-base-bits 4 --precision bf16 {LATE}",
        "--offload-gradients nvme --offload-params nvme --offload-optimizer nvme",
    ),
}


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", ADAPTERS)
def test_gradients_of_adapters(name: str, corpus: Path, tmp_path: Path) -> None:
    train(1, [*flags_of(corpus, tmp_path, "--train-iters 1"), "--save", str(tmp_path / "base")])
    ranks, words, what, _ = ADAPTERS[name]
    data = [*data_flags(corpus, tmp_path / "cache"), "--seq-length", "12", "--train-iters", str(STEPS), *BATCH]
    flags = ["--init-from", str(tmp_path / "base"), "--lora-rank", "2", *HORIZONTAL, *data, *words.split()]
    plain, other = (
        run_ranks(ranks, numbers_on_rank, ranks, [*flags, *more]) for more in ([], flags_for(what, tmp_path))
    )
    for (own, weights), (theirs, other_weights) in zip(plain, other, strict=True):
        assert theirs == pytest.approx(own, rel=1e-9) and len({*own}) == 2 * STEPS
        for one, another in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(another, one)


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", ["ZeRO-2, late, a share", "one rank, all on disks"])
def test_nothing_depends_on_how_fast_a_lane_is(name: str, corpus: Path, tmp_path: Path, seed: int) -> None:
    ranks, words, what, infinite = DISKS[name]
    flags = [*flags_of(corpus, tmp_path, words), *flags_for(what, tmp_path)]
    plain, slowed = (run_ranks(ranks, bits_on_rank, ranks, flags, {*infinite}, each) for each in (None, seed))
    assert plain == slowed


@pytest.mark.slow
@pytest.mark.parametrize("what", ["to add to it", "for its update"])
def test_a_flipped_bit_of_a_gradient_is_an_error(what: str, corpus: Path, tmp_path: Path) -> None:
    """In a sum that is added to, and in one that is used."""
    words = f"--offload-gradients nvme --nvme-path {tmp_path} --global-batch-size {2 if what == 'to add to it' else 1}"
    job, _ = job_on_rank(0, 1, [*flags_of(corpus, tmp_path, "--precision bf16"), *words.split(), *SMALL])
    swap, gradients = job.state.model.host.disks, job.state.model.gradients
    read = gradients._read

    def flipped(key: tuple[int, int], op: object) -> None:
        swap._newest[f"bucket {key[0]}, part {key[1]}: gradient"].request.wait()  # type: ignore[union-attr]
        with swap.paths[0].open("r+b") as file:
            extent = swap._layout.extents(f"bucket {key[0]}, part {key[1]}: gradient", 0)[0]
            file.seek(extent.offset)
            byte = file.read(1)[0]
            file.seek(extent.offset)
            file.write(bytes([byte ^ 1]))
        read(key, op)  # type: ignore[arg-type]

    gradients._read = flipped  # type: ignore[method-assign]
    with pytest.raises(SwapDamaged, match=r"part \d+: gradient' of .* bytes has the checksum"):
        job.fit()
    job.close()
