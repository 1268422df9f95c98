"""Model state and activations off the device, with everything else: loss, gradient norm and final weights after four
steps, in `make test-all` ten, against one process in float64 that has none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.config.tiers import offload_of
from tests.parity.pairs import all_pairs, pairs
from tests.parity.tier_layouts import AXES, COLUMNS, VIRTUAL, Case, cases, whole_run
from tests.parity.training import Outcome, data_flags, small_model, train, worst

COUNT = 64
TOLERANCE = 1e-9
TRAINS = ["--precision", "fp64", "--lr", "1e-2", "--clip-grad", "0.5"]
Flags = Callable[[Case], list[str]]


@pytest.fixture(scope="module")
def flags_of(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Flags:
    """The flags of a case's model, whole or with adapters on a trained one, and of its data."""
    folder = tmp_path_factory.mktemp("tiers")
    data = data_flags(corpus, folder / "cache")
    steps = ["--train-iters", "10" if pytestconfig.option.depth == "all" else "4"]

    def model(case: Case) -> list[str]:
        words = [*small_model(case.layers, heads=case.heads), "--ffn-hidden-size", "48"]
        words += ["--init-method-std", "0.1", "--make-vocab-size-divisible-by", "1"]
        words += ["--position-embedding", "alibi" if case.tied else "rotary"]
        return words + ["--untie-embeddings-and-output-weights"] * (not case.tied)

    def flags(case: Case) -> list[str]:
        words = [*TRAINS, *steps, *data, "--global-batch-size", str(case.batch)]
        words += ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"] * case.dropout
        if not case.lora:
            return [*model(case), *words]
        base = folder / f"base-{case.layers}-{case.heads}-{case.tied}"
        if not base.exists():
            made = ["--train-iters", "1", "--global-batch-size", "4", "--micro-batch-size", "4", "--save", str(base)]
            train(1, [*model(case), *TRAINS, *data, *made])
        return [*words, "--init-from", str(base), "--seq-length", "12", "--lora-rank", "3"]

    return flags


@pytest.fixture(scope="module")
def alone(flags_of: Flags) -> Callable[[Case], Outcome]:
    """The results of one process, made once for each model and batch."""
    kept: dict[tuple[str, ...], Outcome] = {}

    def run(case: Case) -> Outcome:
        flags = tuple(flags_of(case))
        if flags not in kept:
            kept[flags] = train(1, [*flags, "--micro-batch-size", "4"])
        return kept[flags]

    return run


@pytest.mark.layouts(draw=cases, check=1, test=8, all=COUNT, salt=16)
def test_every_tier_with_everything(
    case: Case, flags_of: Flags, alone: Callable[[Case], Outcome], tmp_path: Path
) -> None:
    flags = [*flags_of(case), *case.layout_flags()]
    flags += case.offload_flags(tmp_path, whole_run(flags, case.ranks))
    found = train(case.ranks, flags, as_nccl=case.carrier == "as NCCL")
    differences = worst(found, alone(case))
    assert all(value < TOLERANCE for value in differences.values()), differences
    assert found.run is not None
    settings = {**vars(found.run.parallel), **vars(found.run.offload)}
    leaves = {column: offload_of(settings[f"offload_{column}"]) for column in COLUMNS}
    given = [column for column in COLUMNS if case.placement != "auto"]
    assert [str(leaves[column]) for column in given] == [case.tier(column) for column in given]
    if case.placement == "auto":
        assert any(leaves[column] for column in COLUMNS), "the search has moved nothing"
    else:
        assert any(leaves.values()), "nothing has left the device"
        assert found.run.parallel.late_update == case.late
    assert not [*tmp_path.glob("disk*/*")], "swap files are removed"


CANNOT_MEET = {
    ("placement", "auto"): {
        *((column, tier) for column in COLUMNS for tier in AXES[column] if tier != "none"),
        *(("order", order) for order in AXES["order"] if order is not None),
        *(("late", True), ("checkpoint", True)),
    },
    ("checkpoint", True): {("optimizer", tier) for tier in ("none", "cpu", "cpu:SHARE")},
    ("sequence_parallel", True): {("tp", 1), ("heads", 3)},
    ("heads", 3): {("tp", 2)},
    ("pp", 3): {("dp", 4), ("shard", 2)},
    ("dp", 1): {("shard", 1), ("shard", 2)},
    ("dp", 2): {("shard", 2)},
}
"""What a value of an axis excludes. The search sets what it chooses; only optimizer state on disks is a checkpoint;
twelve ranks are too many.
"""


@pytest.mark.parametrize("seed", [0, 16, 2026])
def test_every_two_values_meet_that_can(seed: int) -> None:
    drawn = list(cases(COUNT, seed))
    met = set().union(*(pairs(case._asdict()) for case in drawn))
    excluded = {frozenset((one, other)) for one, others in CANNOT_MEET.items() for other in others}
    assert {frozenset(pair) for pair in {*all_pairs(AXES)} - met} == excluded
    assert len({*drawn}) == COUNT and list(cases(COUNT, seed)) == drawn
    assert AXES.keys() == {*Case._fields} and {*AXES["schedule"]} == {*VIRTUAL}
