"""Model state and activations off the device, with everything else: loss, gradient norm and final weights after four
steps, in `make test-all` ten. What is to change no bit is compared to the bit with the layout without it, checkpoints
too; what is exact, with one process in float64 that has none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.pairs import all_pairs, pairs
from tests.parity.tier_layouts import AXES, COLUMNS, MESSAGES, NUMBERS, RULES, VIRTUAL, Case, cases, whole_run
from tests.parity.training import Outcome, data_flags, small_model, train, unequal, worst
from tests.parity.ways import Way

COUNT = 95
TOLERANCE = 1e-9
NEAR = {"loss": 0.02, "grad_norm": 0.1}
"""Of numbers of fewer bits, or messages of fewer, against float64."""
TRAINS = ["--lr", "1e-2", "--eval-interval", "2"]
SAVED = 2
"""Steps between checkpoints."""
Flags = Callable[[Case], list[str]]
Trained = Callable[..., Outcome]


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
        words = [*TRAINS, *steps, *data, "--global-batch-size", str(case.batch), "--clip-grad", str(case.clip)]
        words += ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"] * case.dropout
        words += [*RULES[case.rule].split(), *NUMBERS[case.numbers].split()]
        if case.lora == "none":
            return [*model(case), *words]
        base = folder / f"base-{case.layers}-{case.heads}-{case.tied}"
        if not base.exists():
            made = ["--train-iters", "1", "--global-batch-size", "4", "--micro-batch-size", "4", "--save", str(base)]
            train(1, [*model(case), *TRAINS, *data, *made, "--precision", "fp64"])
        words += ["--lora-base-bits", case.lora[0]] * (case.lora != "whole")
        return [*words, "--init-from", str(base), "--seq-length", "12", "--lora-rank", "3"]

    return flags


@pytest.fixture(scope="module")
def alone(flags_of: Flags) -> Callable[[Case], Outcome]:
    """The results of one process in float64, made once for each model and batch."""
    kept: dict[tuple[str, ...], Outcome] = {}

    def run(case: Case) -> Outcome:
        flags = tuple(flags_of(case._replace(numbers="fp64")))
        if flags not in kept:
            kept[flags] = train(1, [*flags, "--micro-batch-size", "4"])
        return kept[flags]

    return run


def trained(case: Case, flags: list[str], folder: Path, way: Way) -> Outcome:
    """The results of a run in this folder, which has its checkpoints."""
    folder.mkdir()
    flags = [*flags, *case.layout_flags(), "--save", str(folder / "saved"), "--save-interval", str(SAVED)]
    run = whole_run(flags, case.ranks)
    flags += [*case.budget_flags(run), *case.offload_flags(folder, run), *["--async-save"] * case.background]
    outcome = train(case.ranks, flags, way=way)
    assert not [*folder.glob("disk*/*"), *folder.glob("files/*")], "files are removed"
    return outcome


def saved(folder: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint, by name of the file."""
    last = max((folder / "saved").glob("iter_*"))
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}


@pytest.mark.layouts(draw=cases, check=1, test=16, all=COUNT, salt=16)
def test_every_tier_with_everything(
    case: Case, flags_of: Flags, alone: Callable[[Case], Outcome], tmp_path: Path
) -> None:
    flags, way, without = flags_of(case), case.way(), tmp_path / "without"
    if case.placement != "auto":
        plain = trained(case.without(), flags, without, replace(case.without().way(), copies=case.numbers == "fp8"))
    goes_on = ["--load", str(without / "saved" / f"iter_{SAVED:07}")] if case.resumes else []
    outcome = trained(case, [*flags, *goes_on], tmp_path / "with", way)
    check_tiers(case, outcome)
    first = SAVED if case.resumes else 0
    if case.placement != "auto":
        others = replace(plain, records=plain.records[first:])
        assert not unequal(outcome, others, norm=1e-13 if case.norm_alone_differs else 0.0)
        assert saved(tmp_path / "with") == saved(without) != {}
    if case.numbers in ("fp16", "fp8"):
        assert any(record.skipped for record in outcome.records) == (case.numbers == "fp16")
        return
    one = alone(case)
    differences = worst(outcome, replace(one, records=one.records[first:]))
    limits = dict.fromkeys(differences, TOLERANCE) if case.is_exact else NEAR
    assert all(differences[name] < limit for name, limit in limits.items()), differences


def check_tiers(case: Case, outcome: Outcome) -> None:
    """What a case says has left the device; a search has moved something."""
    assert outcome.run is not None
    settings = {**vars(outcome.run.parallel), **vars(outcome.run.offload)}
    leaves = {column: settings[f"offload_{column}"] for column in COLUMNS}
    assert any(leaves.values()), "nothing has left the device"
    if case.placement != "auto":
        words = [str(leaves[column]) for column in COLUMNS]
        assert [word.partition(":")[0] if case.units else word for word in words] == [*map(case.tier, COLUMNS)]
        parallel = outcome.run.parallel
        assert (parallel.late_update, parallel.early_update) == (case.updates == "late", case.updates == "early")


CANNOT_MEET = {
    ("placement", "auto"): {
        *((column, tier) for column in COLUMNS for tier in AXES[column] if tier != "none"),
        *(("order", order) for order in AXES["order"] if order is not None),
        *((name, value) for name in ("numbers", "messages") for value in {*AXES[name]} - {"fp64", "exact"}),
        *((name, True) for name in ("checkpoint", "units", "slow", "resumes")),
        *(("updates", "late"), ("updates", "early")),
        *(("gathered", "one"), ("gathered", "all"), ("parts", "small")),
    },
    ("placement", "flags"): {("units", True)},
    ("units", True): {(column, tier) for column in COLUMNS for tier in ("cpu:SHARE", "nvme:SHARE")},
    ("checkpoint", True): {("optimizer", tier) for tier in ("none", "cpu", "cpu:SHARE", "files")},
    ("updates", "early"): {("optimizer", tier) for tier in ("none", "cpu", "cpu:SHARE", "files")},
    ("sequence_parallel", True): {("tp", 1), ("heads", 3)},
    ("shard_inputs", True): {
        *(("tp", 1), ("heads", 3), ("sequence_parallel", True), ("recompute", "none"), ("recompute", "selective"))
    },
    ("heads", 3): {("tp", 2)},
    ("pp", 3): {("dp", 4), ("shard", 2)},
    ("dp", 1): {
        ("shard", 1),
        ("shard", 2),
        ("carrier", "late"),
        *(("messages", each) for each in {*MESSAGES} - {"exact"}),
    },
    ("dp", 2): {("shard", 2)},
    ("carrier", "late"): {("overlap", False)},
    ("messages", "weights"): {("zero", 0)},
    ("messages", "feedback"): {("resumes", True)},
    ("messages", "bf16"): {("numbers", numbers) for numbers in NUMBERS if numbers != "bf16"},
    ("numbers", "fp8"): {("parts", "small"), *(("lora", base) for base in {*AXES["lora"]} - {"none"})},
}
"""What a value of an axis excludes. The search sets what it chooses, and may change bits; units are named in files;
only optimizer state on disks is a checkpoint, or goes back; twelve ranks are too many; one rank sends nothing; what
blocks have lost is in no checkpoint.
"""


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("seed", [16, 2026])
def test_every_two_values_meet_that_can(seed: int) -> None:
    drawn = list(cases(COUNT, seed))
    met = set().union(*(pairs(case._asdict()) for case in drawn))
    excluded = {frozenset((one, other)) for one, others in CANNOT_MEET.items() for other in others}
    assert {frozenset(pair) for pair in {*all_pairs(AXES)} - met} == excluded
    assert len({*drawn}) == COUNT
    assert AXES.keys() == {*Case._fields} and {*AXES["schedule"]} == {*VIRTUAL}
