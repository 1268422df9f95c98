"""Vertical order is the same program: loss, gradient norm and final weights against one process in horizontal order, in
float64, after four steps, in `make test-all` ten. Against horizontal order on the same ranks it is the same to the bit
where sums have the same order. And what travels does not grow with the number of micro-batches.

Layouts of the whole program have the order as an axis too: tests/parity/test_layouts.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

from megazero.mpu.parameter import StateGroup
from megazero.plan.gathered import gathered_bytes
from megazero.plan.step_lists import StageLists
from tests.parameters import values_of
from tests.parity.pairs import Axes
from tests.parity.pairs import table as made_table
from tests.parity.training import Outcome, data_flags, job_on_rank, small_model, train, worst
from tests.ranks import run_ranks

VERTICAL = ["--micro-batch-order", "vertical"]
BATCH, COUNT = 56, 30
MODEL = [*small_model(4, heads=4), "--make-vocab-size-divisible-by", "1", "--ffn-hidden-size", "48"]
TRAINS = [
    *("--precision", "fp64", "--global-batch-size", str(BATCH), "--lr", "1e-2", "--clip-grad", "0.5"),
    *("--bucket-size", "4000", "--init-method-std", "0.1"),
]
VIRTUAL = {"gpipe": 2, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


class Layout(NamedTuple):
    """group: most micro-batches of a group; 0: all."""

    zero: int
    tp: int
    pp: int
    dp: int
    schedule: str
    accumulation: int
    group: int
    recompute: str
    regather: str
    tied: bool
    dropout: bool
    late: bool
    lora: bool

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def flags(self) -> list[str]:
        words = f"--tp {self.tp} --pp {self.pp} --zero-stage {self.zero} --pipeline-schedule {self.schedule} "
        words += f"--virtual-stages {VIRTUAL[self.schedule]} --recompute-granularity {self.recompute} "
        words += f"--micro-batch-size {BATCH // (self.dp * self.accumulation)} --zero3-regather {self.regather}"
        words += " --late-update" * self.late + " --sequence-parallel" * (self.tp > 1 and self.late)
        words += f" --vertical-group-size {self.group}" * (self.group > 0)
        return [*words.split(), *VERTICAL]


AXES: Axes = {
    "zero": (0, 1, 2, 3, 3),
    "tp": (1, 2),
    "pp": (1, 2, 3),
    "dp": (1, 2),
    "schedule": tuple(VIRTUAL),
    "accumulation": (1, 4, 7),
    "group": (0, 0, 2, 3),
    "recompute": ("none", "full"),
    "regather": ("micro-batch", "step"),
    "tied": (True, False),
    "dropout": (True, False),
    "late": (False, True),
    "lora": (False, False, True),
}


def fits(layout: Layout) -> bool:
    """Whether a small machine can start it, and what it asks for exists."""
    gathers = layout.zero == 3 and layout.dp > 1
    return layout.ranks <= 8 and (gathers or layout.regather == "micro-batch")


def table() -> list[Layout]:
    """Layouts, those with the most pairs of values that are new first."""
    return [Layout(**values) for values in made_table(AXES, lambda v: v if fits(Layout(**v)) else None, 8, COUNT)]


@pytest.fixture(scope="module")
def flags_of(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[..., list[str]]:
    """The flags of a model of this kind, whole or with adapters on a trained one."""
    folder, steps = tmp_path_factory.mktemp("vertical"), "10" if pytestconfig.option.depth == "all" else "4"
    data = data_flags(corpus, folder / "cache")

    def flags(*, tied: bool, dropout: bool, lora: bool = False) -> list[str]:
        words = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"] * dropout
        model = [*MODEL, *["--untie-embeddings-and-output-weights"] * (not tied)]
        if not lora:
            return [*model, *TRAINS, *words, *data, "--train-iters", steps]
        base = folder / f"base-{tied}"
        if not base.exists():
            train(1, [*model, *TRAINS, *data, "--train-iters", "1", "--micro-batch-size", "4", "--save", str(base)])
        adapters = ["--init-from", str(base), "--seq-length", "12", "--lora-rank", "3", "--train-iters", steps]
        return [*(word for word in TRAINS if word not in ("--init-method-std", "0.1")), *words, *data, *adapters]

    return flags


@pytest.fixture(scope="module")
def alone(flags_of: Callable[..., list[str]]) -> Callable[..., Outcome]:
    """The results of one process in horizontal order, made once for each model."""
    kept: dict[object, Outcome] = {}

    def run(**kind: bool) -> Outcome:
        key = tuple(kind.values())
        if key not in kept:
            kept[key] = train(1, [*flags_of(**kind), "--micro-batch-size", "7"])
        return kept[key]

    return run


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("layout", table(), ids=lambda layout: "-".join(map(str, layout)))
def test_every_layout_is_one_process(
    layout: Layout, flags_of: Callable[..., list[str]], alone: Callable[..., Outcome]
) -> None:
    kind = {"tied": layout.tied, "dropout": layout.dropout, "lora": layout.lora}
    differences = worst(train(layout.ranks, [*flags_of(**kind), *layout.flags()]), alone(**kind))
    assert all(value < 1e-9 for value in differences.values()), differences


def bits(rank: int, size: int, flags: list[str]) -> tuple[list[str], list[str]]:
    """Losses, norms and evaluations of a run, and its weights on this rank."""
    job, recorder = job_on_rank(rank, size, flags)
    job.fit()
    told = [repr((record.loss, record.grad_norm)) for record in recorder.records]
    with job.state.model.reading():
        weights = [piece.values.detach().double().numpy().tobytes() for piece in values_of(nn.ModuleList(job.stages))]
    return [*told, repr(recorder.losses)], [hashlib.sha256(each).hexdigest() for each in weights]


BITS = {
    "one rank": (1, 7, "--precision fp32"),
    "one rank, recompute": (1, 4, "--recompute-granularity full --precision bf16"),
    "one rank, FP8": (1, 4, "--fp8 delayed --precision bf16 --hidden-size 32 --seq-length 16"),
    "tp, ZeRO-1": (4, 7, "--tp 2 --sequence-parallel --zero-stage 1 --precision fp32"),
    "two stages": (2, 7, "--pp 2 --pipeline-schedule zb-h1 --precision fp32"),
}


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("name", BITS)
def test_dropout_and_sums_are_those_of_horizontal_order_to_the_bit(
    name: str, flags_of: Callable[..., list[str]]
) -> None:
    """The masks of a micro-batch do not depend on when a unit comes to it, and gradients are summed in the order of the
    micro-batches. A tied table is not summed in this order: head and embedding take turns in horizontal order.
    """
    ranks, accumulation, words = BITS[name]
    size = BATCH // (accumulation * (2 if ranks == 4 else 1))
    flags = [*flags_of(tied=False, dropout=True), *words.split(), "--micro-batch-size", str(size), "--train-iters", "4"]
    groups = ["--vertical-group-size", "3"] * (name == "two stages")
    assert run_ranks(ranks, bits, ranks, flags) == run_ranks(ranks, bits, ranks, [*flags, *VERTICAL, *groups])


class Sent(NamedTuple):
    """Bytes of a rank's gathers and reductions in a step, counted where they are sent.

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


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("words", ["--zero-stage 3", "--pp 2 --zero-stage 3", "--zero-stage 2"])
def test_what_travels_does_not_grow_with_the_micro_batches(words: str, flags_of: Callable[..., list[str]]) -> None:
    """Parameters travel at most once for forward and once for backward, gradients once."""
    ranks, found = 4 if "--pp" in words else 2, list[list[Sent]]()
    for accumulation in (1, 4, 7):
        flags = [*flags_of(tied=False, dropout=False), *words.split(), *VERTICAL]
        found.append(run_ranks(ranks, sent, ranks, [*flags, "--micro-batch-size", str(BATCH // (2 * accumulation))]))
    assert found[0] == found[1] == found[2]
    for own in found[0]:
        assert own.reduced == own.gradients
        if "3" not in words:
            assert own.gathered == own.gradients and own.planned == 0  # an element of either takes 8 bytes
        else:
            assert own.forward < own.gathered == own.planned <= own.forward + own.backward


def test_what_is_drawn() -> None:
    layouts = table()
    assert len({*layouts}) == COUNT
    assert all({getattr(layout, name) for layout in layouts} == set(values) for name, values in AXES.items())
