"""ZeRO in every combination with the rest: loss, gradient norm and final weights against one process, in float64, after
four steps, in `make test-all` ten. A table of layouts whose every two values meet, drawn once and for all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.gathered import largest_unit
from megazero.train.init_from import model_source
from tests.parity.pairs import Axes, pairs
from tests.parity.pairs import table as made_table
from tests.parity.training import Outcome, data_flags, small_model, train, worst

MODEL = [*small_model(5, heads=4), "--make-vocab-size-divisible-by", "1", "--ffn-hidden-size", "48"]
TRAINS = [
    *("--precision", "fp64", "--global-batch-size", "16"),
    *("--lr", "1e-2", "--clip-grad", "0.5"),
]
VIRTUAL = {"gpipe": 2, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
COUNT = 60


class Layout(NamedTuple):
    """budget: of gathered parameters, in units. half: whether state is sharded over half of the replicas."""

    zero: int
    tp: int
    pp: int
    dp: int
    schedule: str
    half: bool
    regather: str
    budget: str
    recompute: str
    accumulation: int
    tied: bool
    lora: bool
    late: bool

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def flags(self) -> list[str]:
        words = f"--tp {self.tp} --pp {self.pp} --zero-stage {self.zero} --pipeline-schedule {self.schedule} "
        words += f"--virtual-stages {VIRTUAL[self.schedule]} --recompute-granularity {self.recompute} "
        words += f"--micro-batch-size {16 // (self.dp * self.accumulation)} --bucket-size 4000"
        words += f" --zero-shard-size {self.dp // 2}" if self.half else ""
        words += " --late-update" * self.late
        return [*words.split(), "--zero3-regather", self.regather]


def fits(layout: Layout, most: int = 8) -> bool:
    """Whether it has no more ranks than a small machine can start, and what it asks for exists."""
    sharded = layout.zero == 3 and layout.dp > 1
    return (
        1 < layout.ranks <= most
        and (layout.dp > 1 or not layout.half)
        and (sharded or (layout.regather, layout.budget) == ("micro-batch", "two"))
    )


LARGE = Layout(3, 1, 3, 4, "zb-h1", True, "micro-batch", "one", "selective", 4, True, False, True)
"""Twelve ranks: three stages and four replicas meet in no smaller layout."""
AXES: Axes = {
    "zero": (0, 1, 2, *(3,) * 6),
    "tp": (1, 2),
    "pp": (1, 2, 3),
    "dp": (1, 2, 2, 4, 4),
    "schedule": tuple(VIRTUAL),
    "half": (False, True),
    "regather": ("micro-batch", "step"),
    "budget": ("one", "two", "all"),
    "recompute": ("none", "selective", "full"),
    "accumulation": (1, 4),
    "tied": (True, False),
    "lora": (False, True),
    "late": (False, True),
}


def table() -> list[Layout]:
    """60 layouts in which every two values meet."""
    return [Layout(**values) for values in made_table(AXES, lambda v: v if fits(Layout(**v)) else None, 15, COUNT)]


@pytest.fixture(scope="module")
def flags_of(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[bool, bool], list[str]]:
    """The flags of a model, tied or not, whole or with adapters on a trained one."""
    folder = tmp_path_factory.mktemp("bases")
    steps = 10 if pytestconfig.option.depth == "all" else 4
    data = ["--train-iters", str(steps), *data_flags(corpus, folder / "cache")]

    def model(tied: bool) -> list[str]:
        return [*MODEL, "--position-embedding", "alibi" if tied else "rotary"] + [
            "--untie-embeddings-and-output-weights"
        ] * (not tied)

    def flags(tied: bool, lora: bool) -> list[str]:
        if not lora:
            return [*model(tied), *TRAINS, *data]
        base = folder / f"tied-{tied}"
        if not base.exists():
            made = [*TRAINS, *data, "--train-iters", "1", "--seed", "3", "--init-method-std", "0.1"]
            train(1, [*model(tied), *made, "--save", str(base)])
        return [*TRAINS, *data, "--init-from", str(base), "--seq-length", "12", "--lora-rank", "3"]

    return flags


@pytest.fixture(scope="module")
def alone(flags_of: Callable[[bool, bool], list[str]]) -> Callable[[bool, bool], Outcome]:
    """The results of one process, made once for each model."""
    kept: dict[tuple[bool, bool], Outcome] = {}

    def run(tied: bool, lora: bool) -> Outcome:
        if (tied, lora) not in kept:
            kept[tied, lora] = train(1, [*flags_of(tied, lora), "--micro-batch-size", "4"])
        return kept[tied, lora]

    return run


@pytest.fixture(scope="module")
def differences(
    flags_of: Callable[[bool, bool], list[str]], alone: Callable[[bool, bool], Outcome]
) -> Callable[[Layout], dict[str, float]]:
    """The largest relative differences of a layout's results from those of one process."""

    def run(layout: Layout) -> dict[str, float]:
        flags = [*flags_of(layout.tied, layout.lora), *layout.flags()]
        if layout.budget != "two":
            parsed = parse_run(flags, layout.ranks, model_source)
            # Half of two replicas is one: then each rank has whole parameters, and there is nothing to gather.
            one = max(1, largest_unit(parsed, axes_of(parsed.parallel, layout.ranks))[0])
            flags += ["--zero3-gathered-bytes", str(one if layout.budget == "one" else 10**9)]
        return worst(train(layout.ranks, flags), alone(layout.tied, layout.lora))

    return run


@pytest.mark.slow
@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("layout", table(), ids=lambda layout: "-".join(map(str, layout)))
def test_every_stage_of_zero_with_everything(layout: Layout, differences: Callable[[Layout], dict[str, float]]) -> None:
    found = differences(layout)
    assert all(value < 1e-9 for value in found.values()), found


@pytest.mark.slow
@pytest.mark.exhaustive
def test_three_stages_of_four_replicas(differences: Callable[[Layout], dict[str, float]]) -> None:
    found = differences(LARGE)
    assert all(value < 1e-9 for value in found.values()), found


def test_in_the_table_every_two_values_meet_that_can() -> None:
    layouts = table()
    met = set().union(*(pairs(layout._asdict()) for layout in [*layouts, LARGE]))
    assert len(set(layouts)) == COUNT
    assert all({getattr(layout, name) for layout in layouts} == set(values) for name, values in AXES.items())
    assert sum(layout.zero == 3 and layout.dp > 1 for layout in layouts) > COUNT // 2
    source = random.Random(3)
    others = [Layout(**{name: source.choice(values) for name, values in AXES.items()}) for _ in range(3000)]
    possible = set().union(*(pairs(layout._asdict()) for layout in others if fits(layout, LARGE.ranks)))
    assert not possible - met
