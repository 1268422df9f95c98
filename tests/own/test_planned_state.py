"""The model state of a user's model by arithmetic, before an engine takes the modules, beside that of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from torch import nn

import megazero
from megazero.mpu.axes import Coordinates
from megazero.own.planned_state import OwnChunks, own_axes
from megazero.own.settings import run_of
from megazero.program.shape import RankShape
from tests.own.models import CASES, Begin, Case, Layer, of_mlp, squared
from tests.own.parallel_models import CASES as CUT
from tests.own.test_drawn_layouts import Drawn, cases
from tests.own.test_several_dtypes import EXACTLY, entropy, micro_batch, units_of
from tests.own.training import RULE, model_of
from tests.ranks import run_ranks


def two_shared() -> list[nn.Module]:
    """Of three stages each has a module of two of them, and holds what the third shares."""
    first, second = Layer(), Layer()
    return [Begin(), first, second, first, second, nn.Linear(12, 1)]


@dataclass(frozen=True)
class SeveralDtypes(Case):
    """In the dtypes that the units have."""

    def built(self) -> list[nn.Module]:
        return [*self.units()]


def several(*, tied: bool) -> SeveralDtypes:
    return SeveralDtypes(partial(units_of, EXACTLY, tied=tied), entropy, lambda draw: micro_batch(0, 0))


MODELS = {
    **CASES,
    **CUT,
    "two shared": Case(two_shared, squared, of_mlp),
    "several dtypes": several(tied=False),
    "several dtypes, tied": several(tied=True),
}
FIXED = {
    "two shared modules": Drawn("two shared", 3, {"pp": 3, "zero_stage": 1, "bucket_size": 100}),
    "tied ends on three stages": Drawn("tied ends", 3, {"pp": 3, "zero_stage": 1}),
    "tied ends in pairs": Drawn("tied ends", 4, {"pp": 2, "zero_stage": 2, "zero_shard_size": 2}),
    "a module twice": Drawn("mlp", 2, {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved"}),
    "frozen units": Drawn("frozen first", 2, {"zero_stage": 3, "offload_params": "cpu:0.5"}),
    "tp": Drawn("tied", 4, {"tp": 2, "pp": 2, "zero_stage": 1, "bucket_size": 700}),
    "tp, sharded": Drawn("partly frozen", 4, {"tp": 2, "zero_stage": 3, "offload_optimizer": "cpu"}),
    "several dtypes": Drawn("several dtypes", 2, {"zero_stage": 3, "bucket_size": 90, "precision": None}),
    "several dtypes, off the device": Drawn(
        "several dtypes, tied",
        2,
        {
            "pp": 2,
            "precision": None,
            "offload_optimizer": "nvme:0.5",
            "offload_params": "nvme",
            "nvme_buffer_bytes": 1 << 19,
        },
    ),
    "halves": Drawn("vision", 2, {"zero_stage": 2, "precision": "bf16", "offload_optimizer": "nvme:0.6"}),
}


class BothStates(NamedTuple):
    """The shape of a rank's state, its bytes by column, and those of its files, as planned and in an engine."""

    planned: RankShape
    shape: RankShape
    planned_bytes: dict[str, int]
    bytes: dict[str, int]
    planned_files: int
    files: int


def both(rank: int, case: Drawn) -> BothStates:
    model = model_of(MODELS[case.model])
    with TemporaryDirectory() as folder:
        said = {name: value for name, value in {**RULE, **case.run}.items() if value is not None}
        fields = said | ({"nvme_path": [folder]} if "nvme" in str(case.run) else {})
        run = run_of(fields, "adamw", model, case.ranks)
        axes = own_axes(model, run, case.ranks)
        at = axes.coordinates(rank)
        state = OwnChunks.of(model, run).state(run, axes, Coordinates(at.pp, at.dp, 0, at.tp))
        planned = state.bytes
        with megazero.engine(model, run=fields) as engine:
            made = engine.state.bytes()
            on_disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            shape = engine.state.shape
    weights = made.pop("parameter") + made.pop("frozen", 0)
    host, gradients = made.pop("host memory", 0), made.pop("gradient")
    has = {"weights": weights, "gradients": gradients, "optimizer": sum(made.values()), "host": host}
    off = planned.elsewhere
    plans = {"weights": planned.weights, "gradients": planned.gradients, "optimizer": planned.optimizer}
    return BothStates(state.shape, shape, {**plans, "host": off.memory}, has, off.files, on_disk)


def require_alike(ranks: list[BothStates]) -> None:
    for rank, state in enumerate(ranks):
        assert state.planned == state.shape, rank
        assert state.planned_bytes == state.bytes, rank
        assert state.planned_files == state.files, rank


@pytest.mark.parametrize("name", FIXED)
def test_a_state_is_known_before_an_engine_has_it(name: str) -> None:
    require_alike(run_ranks(FIXED[name].ranks, both, FIXED[name]))


@pytest.mark.slow
@pytest.mark.layouts(draw=cases, check=1, test=6, all=60, salt=41)
def test_the_state_of_a_drawn_layout_is_known(case: Drawn) -> None:
    require_alike(run_ranks(case.ranks, both, case))


def test_planning_leaves_the_modules_as_they_are() -> None:
    model = model_of(CASES["tied ends"])
    before = [(name, tensor, tensor.clone()) for unit in model.units for name, tensor in unit.tensors()]
    run = run_of({"pp": 3, "zero_stage": 3}, "adamw", model, 3)
    OwnChunks.of(model, run).state(run, own_axes(model, run, 3), Coordinates(0, 0, 0, 0))
    after = [(name, tensor) for unit in model.units for name, tensor in unit.tensors()]
    assert [name for name, _ in after] == [name for name, _, _ in before] and not model.is_taken
    for (_, tensor, value), (_, now) in zip(before, after, strict=True):
        assert now is tensor and torch.equal(now, value)
