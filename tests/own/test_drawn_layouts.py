"""Layouts that nobody has thought of for a user's model, drawn by the seed, beside plain torch in fp64."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.own.models import CASES, Trained, plainly_trained
from tests.own.training import RULE, require_equal, trained_with
from tests.parity.pairs import Axes, Values, table
from tests.ranks import run_ranks

MOST_RANKS = 6
VIRTUAL = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2}
"""The model chunks of a stage, by schedule."""
TIERS = (None, None, "cpu", "nvme")
AXES: Axes = {
    "model": tuple(CASES),
    "dp": (1, 2, 4),
    "pp": (1, 2, 3),
    "schedule": tuple(VIRTUAL),
    "zero_stage": (0, 1, 2, 3),
    "zero_shard_size": (None, 2),
    "bucket_size": (30, 200, 100_000),
    "recompute": (False, True),
    "late_update": (False, True),
    "overlap": (True, False),
    "offload_optimizer": (*TIERS, "cpu:0.4", "nvme:0.6"),
    "offload_gradients": TIERS,
    "offload_params": TIERS,
    "offload_activations": (None, None, "cpu", "cpu:0.5", "nvme", "nvme:0.5"),
}


class Drawn(NamedTuple):
    """A model and its layout on a number of ranks."""

    model: str
    ranks: int
    run: dict[str, Any]

    @property
    def name(self) -> str:
        fields = (f"{name}={value}" for name, value in self.run.items())
        return " ".join([self.model, f"ranks={self.ranks}", *fields])


def fit(values: Values) -> Values | None:
    """Values of a layout that there is: schedules are of pipelines, and a model does not go with all of them."""
    made = dict(values)
    if made["dp"] * made["pp"] > MOST_RANKS:
        return None
    if made["pp"] == 1:
        made["schedule"] = "1f1b"
    chunks = made["pp"] * VIRTUAL[made["schedule"]]
    if chunks > len(CASES[made["model"]].units()):
        return None
    if made["model"] == "convolutional":
        made["recompute"] = False  # a unit that changes its input cannot be computed again
    if made["dp"] < 4 or made["zero_stage"] == 0:
        made["zero_shard_size"] = None
    return made


def drawn(values: Values) -> Drawn:
    run = {name: values[name] for name in ("pp", "zero_stage", "bucket_size", "late_update", "overlap")}
    virtual_stages = VIRTUAL[values["schedule"]]
    if values["pp"] > 1:
        run |= {"pipeline_schedule": values["schedule"], "virtual_stages": virtual_stages}
    if values["recompute"]:
        run["recompute_granularity"] = "full"
    columns = ("offload_optimizer", "offload_gradients", "offload_params", "offload_activations")
    optional = ("zero_shard_size", *columns)
    run |= {name: values[name] for name in optional if values[name] is not None}
    return Drawn(values["model"], values["dp"] * values["pp"], run)


def cases(count: int, seed: int) -> list[Drawn]:
    """Each is the one with the most pairs of values that no other has, for what it costs."""
    return [drawn(values) for values in table(AXES, fit, seed, count, cost=cost)]


def cost(values: Values) -> float:
    return 8.0 + float(values["dp"] * values["pp"])


plain = cache(plainly_trained)


def trained(rank: int, case: Drawn) -> Trained:
    return trained_with(CASES[case.model], {**RULE, **case.run}, evaluates_each=True)


@pytest.mark.slow
@pytest.mark.layouts(draw=cases, check=1, test=5, all=120, salt=40)
def test_a_drawn_layout_trains_as_plain_torch(case: Drawn) -> None:
    for rank, made in enumerate(run_ranks(case.ranks, trained, case)):
        require_equal(made, plain(CASES[case.model]), f"{case.name}, rank {rank}")
