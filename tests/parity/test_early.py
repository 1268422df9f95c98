"""Updates before the norm is known (--early-update): the numbers are those of a run in memory, whether a step is
clipped, skipped or neither, and steps of all these kinds do occur.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.rank_state import stage_bytes
from tests.parity.training import data_flags, small_model, train, unequal, worst
from tests.parity.ways import FP16, Way

MODEL = [*small_model(4, heads=4), "--init-method-std", "0.1", "--lr", "1e-2", "--seed", "3"]
STEPS = ["--train-iters", "8", "--global-batch-size", "8", "--micro-batch-size", "2"]
FP64 = "--precision fp64"
ZB = f"{FP64} --pp 2 --pipeline-schedule zb-h1 --micro-batch-size 1"
ONES = f"{FP64} --zero-stage 2 --micro-batch-size 1"
EARLY = "--offload-optimizer nvme --early-update"


class Case(NamedTuple):
    """A layout, and what of it leaves the device. way: how its ranks run, with and without early updates. clip: a norm
    that some of the steps have more of, and others less.
    """

    ranks: int
    layout: str
    offload: str = EARLY
    way: Way = Way()
    clip: float = 0.95


CASES = {
    "one rank": Case(1, FP64),
    "one micro-batch": Case(1, f"{FP64} --micro-batch-size 8"),
    "small parts": Case(1, f"{FP64} --bucket-size 4000", f"{EARLY} --nvme-buffer-bytes 250KB"),
    "a share": Case(1, FP64, "--offload-optimizer nvme:0.5 --early-update"),
    "units": Case(2, f"{FP64} --zero-stage 2", "--offload-optimizer nvme:block-1,head --early-update"),
    "ZeRO-1": Case(2, f"{FP64} --zero-stage 1 --bucket-size 4000"),
    "ZeRO-3, hybrid shards": Case(4, f"{FP64} --zero-stage 3 --zero-shard-size 2"),
    "tp": Case(2, f"{FP64} --tp 2"),
    "tp, partial sums": Case(2, f"{FP64} --tp 2 --sequence-parallel", f"{EARLY} --offload-gradients cpu"),
    "stages, tied": Case(4, f"{FP64} --pp 2 --zero-stage 1 --micro-batch-size 1"),
    "zero bubble": Case(2, ZB, f"{EARLY} --offload-params cpu"),
    "all on disks": Case(2, f"{FP64} --zero-stage 3", f"{EARLY} --offload-params nvme --offload-gradients nvme"),
    "vertical": Case(
        1, f"{FP64} --micro-batch-order vertical", f"{EARLY} --offload-params nvme --offload-gradients cpu"
    ),
    "horizontal, activations": Case(
        1, f"{FP64} --micro-batch-order horizontal", f"{EARLY} --offload-params nvme --offload-activations nvme"
    ),
    "whole steps": Case(2, f"{FP64} --zero-stage 1", f"{EARLY} --nvme-checkpoint"),
    "parameters in plain files": Case(1, FP64, f"{EARLY} --offload-params files"),
    "sgd": Case(1, f"{FP64} --optimizer sgd --lr 0.1", clip=0.91),
    "dropout and recompute": Case(1, f"{FP64} --hidden-dropout 0.2 --recompute-granularity full"),
    "ranks with unequal numbers of tokens": Case(4, ONES, way=Way(masked=True), clip=1.4),
    "delays on every lane": Case(2, f"{FP64} --zero-stage 3", f"{EARLY} --offload-params nvme", Way(delays=1)),
    "memory that nobody has written": Case(1, f"{FP64} --micro-batch-size 8", way=Way(unwritten=True)),
    "two memories": Case(2, f"{FP64} --zero-stage 1", way=Way(apart=True)),
    "bf16": Case(2, "--precision bf16 --zero-stage 1"),
}
SKIPPED = {
    "fp16": Case(2, f"{FP16} --zero-stage 1", way=Way(infinite=frozenset({5}))),
    "fp16, two memories": Case(1, FP16, way=Way(infinite=frozenset({5}), apart=True)),
    "fp16, all on disks": Case(
        1, FP16, f"{EARLY} --offload-params nvme --offload-gradients nvme", Way(infinite=frozenset({4, 7}))
    ),
    "fp16, parameters in host memory": Case(2, f"{FP16} --zero-stage 3", f"{EARLY} --offload-params cpu"),
    "fp32": Case(1, "--precision fp32", way=Way(infinite=frozenset({3, 6}))),
}


def flags_of(case: Case, folder: Path, corpus: Path) -> tuple[list[str], list[str]]:
    """The flags of a case, and those that its offload adds."""
    offload = [word.replace("block-", "block ") for word in case.offload.split()]
    for tier, option in (("nvme", "--nvme-path"), ("files", "--files-path")):
        (folder / tier).mkdir()
        offload += [option, str(folder / tier)] if any(word.startswith(tier) for word in offload) else []
    clip = ["--clip-grad", f"{case.clip}"]
    return [*MODEL, *STEPS, *clip, *data_flags(corpus, folder / "cache"), *case.layout.split()], offload


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_a_run_in_memory(name: str, corpus: Path, tmp_path: Path) -> None:
    case = CASES[name]
    flags, offload = flags_of(case, tmp_path, corpus)
    plain = train(case.ranks, flags, way=Way(masked=case.way.masked))
    outcome = train(case.ranks, [*flags, *offload], way=case.way)
    differences = worst(outcome, plain)
    assert max(differences.values()) < (1e-12 if FP64 in case.layout else 1e-6), differences
    norms = [record.grad_norm for record in plain.records]
    assert len({*norms}) == len(norms) and min(norms) < case.clip < max(norms), norms
    # Each clipped step whose predecessor was not clipped has been made twice; the first one is on time.
    clipped = [norm > case.clip for norm in norms]
    early = [not before for before in (True, *clipped[:-1])]
    again = [now if tried else None for tried, now in zip(early, clipped, strict=True)]
    assert [record.updated_again for record in outcome.records] == again
    assert {None, True, False} == {*again}


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("name", SKIPPED)
def test_a_skipped_step_leaves_all_as_it_was(name: str, corpus: Path, tmp_path: Path) -> None:
    """Every bit is that of updates on time, parameters that an early update has overwritten among them."""
    case = SKIPPED[name]
    flags, offload = flags_of(case, tmp_path, corpus)
    flags = [*flags, "--clip-grad", "0"]
    outcome = train(case.ranks, [*flags, *offload], way=case.way)
    on_time = train(case.ranks, [*flags, *(word for word in offload if word != "--early-update")], way=case.way)
    assert not unequal(outcome, on_time)
    skipped = [record.skipped for record in outcome.records]
    assert any(skipped) and not all(skipped)
    again = [record.updated_again for record in outcome.records]
    assert all(again[at] for at, now in enumerate(skipped) if now and at > 0 and not skipped[at - 1])
    assert {True, False} <= {*again}


def test_a_layout_without_early_parts_says_so(corpus: Path, tmp_path: Path) -> None:
    """Gradients of norms are summed over tp once a step. No step claims early updates, and no file has a slot more."""
    case = Case(2, f"{FP64} --tp 2 --sequence-parallel")
    flags, offload = flags_of(case, tmp_path, corpus)
    outcome = train(2, [*flags, *offload])
    assert [record.updated_again for record in outcome.records] == [None] * 8
    on_time = [word for word in offload if word != "--early-update"]
    runs = [parse_run([*flags, *words], 2) for words in (offload, on_time)]
    with_early, without = (stage_bytes(run, axes_of(run, 2))[0].elsewhere.files for run in runs)
    assert with_early == without > 0
