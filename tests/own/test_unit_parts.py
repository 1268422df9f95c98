"""Units measured as one tp rank has them, before there are ranks: budgets, placements and times of cut models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megazero
from megazero.config.source import ConfigError
from megazero.own import unit_times
from megazero.own.settings import run_of
from megazero.own.unit_bytes import unit_bytes
from megazero.own.unit_parts import cut_units
from megazero.own.unit_times import unit_seconds
from tests.own.models import Batch
from tests.own.test_placed import RATES, placed
from tests.own.test_step_memory import MICRO_BATCHES, MODELS, CutBlock, planned_peaks
from tests.ranks import run_ranks

CASE, HOST = MODELS["cut"], torch.device("cpu")
BATCHES = [CASE.batch(torch.Generator().manual_seed(number)) for number in range(MICRO_BATCHES)]


def seen_of(model: megazero.Model) -> list[Any]:
    """What a measurement might change: classes, attributes, hooks and values of all modules."""
    modules = [module for unit in model.units for module in unit.modules()]
    attributes = [
        {name: value for name, value in vars(module).items() if isinstance(value, int | str | float)}
        for module in modules
    ]
    hooks = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in modules]
    values = [tensor.detach().clone() for unit in model.units for _, tensor in unit.tensors()]
    return [[type(module) for module in modules], attributes, hooks, [value.tolist() for value in values]]


def test_units_are_cut_for_a_while() -> None:
    """Inside of the context a block has half of everything that the plan cuts; behind it the model is as before."""
    model = CASE.model()
    before = seen_of(model)
    with cut_units(model, run_of({"tp": 2}, "adamw", model, 2)) as parts:
        tensors = parts.tensors(model.called_units[1], HOST)
        block = model.called_units[1].module
        assert isinstance(block, CutBlock) and (block.heads, block.up.out_features) == (3, 72)
        shapes = {name: [*tensors[f"module.{name}.weight"].shape] for name in ("qkv", "out", "up", "down")}
        assert shapes == {"qkv": [108, 72], "out": [72, 36], "up": [72, 72], "down": [72, 72]}
        whole = torch.cat([block.qkv.weight[each * 72 : each * 72 + 36] for each in range(3)])
        assert torch.equal(tensors["module.qkv.weight"], whole)
        table = parts.tensors(model.called_units[0], HOST)["module.words.weight"]
        assert [*table.shape] == [251, 72]
    assert seen_of(model) == before


@pytest.mark.parametrize("fields", [{"tp": 2}, {"tp": 3, "recompute_granularity": "full"}])
def test_measurements_leave_no_trace(fields: Mapping[str, Any]) -> None:
    model = CASE.model()
    run, before = run_of(fields, "adamw", model, 6), seen_of(model)
    draws = torch.get_rng_state()
    measured = unit_bytes(model, BATCHES[0], run, HOST)
    seconds = unit_seconds(model, BATCHES[0], run, HOST)
    assert len(measured.units) == len(seconds) == 6 and min(seconds) > 0
    assert seen_of(model) == before and torch.equal(torch.get_rng_state(), draws)


def test_a_unit_that_fails_while_it_is_measured_is_as_before() -> None:
    model = CASE.model()
    run, before = run_of({"tp": 2}, "adamw", model, 2), seen_of(model)
    with pytest.raises(IndexError):
        unit_bytes(model, {"x": BATCHES[0]["x"] + 600}, run, HOST)
    assert seen_of(model) == before


def losses(rank: int, fields: dict[str, Any], measured: bool) -> list[float]:
    example = {"example": BATCHES, "timed": BATCHES[0]} if measured else {}
    with megazero.engine(CASE.model(), run=fields, **example) as engine:
        share = len(BATCHES) // engine.data_ranks
        mine = BATCHES[engine.data_rank * share :][:share]
        return [float(engine.step(mine).loss) for _ in range(3)]


def test_a_run_that_was_measured_trains_the_same() -> None:
    plain, measured = (run_ranks(4, losses, {"tp": 2, "zero_stage": 1}, measured) for measured in (False, True))
    assert plain == measured and plain[0][2] < plain[0][0]


def budgeted(rank: int, fields: dict[str, Any]) -> tuple[str, list[int]]:
    """(what is refused, or planned, the most bytes of each stage)."""
    try:
        with megazero.engine(CASE.model(), run=fields, example=BATCHES) as engine:
            memory = engine.planned_memory
            assert memory is not None
            engine.step(BATCHES)
            return str(memory), [each.total_bytes for each in memory.peaks]
    except ConfigError as error:
        return str(error), []


def test_tp_ranks_have_budgets() -> None:
    (most,) = {peaks.total_bytes for peaks in planned_peaks(CASE, {"tp": 2}, 2)}
    (whole,) = {peaks.total_bytes for peaks in planned_peaks(CASE, {}, 1)}
    assert most < 0.65 * whole
    for told, peaks in run_ranks(2, budgeted, {"tp": 2, "device_memory_budget": most}):
        assert peaks == [most] and "of offload.device_memory_budget" in told
    told, _ = run_ranks(2, budgeted, {"tp": 2, "device_memory_budget": most - 1})[0]
    assert f"offload.device_memory_budget {most - 1:,}: a rank takes {most:,} bytes" in told
    change = re.search(r"nearest: parallel.recompute_granularity full \(([\d,]+) bytes of memory", told)
    assert change is not None, told
    less = int(change[1].replace(",", ""))
    fields = {"tp": 2, "device_memory_budget": most - 1, "recompute_granularity": "full"}
    assert [peaks for _, peaks in run_ranks(2, budgeted, fields)] == [[less]] * 2


def placed_on_rank(rank: int, rates: str) -> tuple[list[str], int, list[float]]:
    fields = placed(rates, tp=2, device_memory_budget=3_500_000, host_memory_budget=8_000_000)
    with megazero.engine(CASE.model(), run=fields, example=BATCHES) as engine:
        assert engine.planned_memory is not None
        off, (peaks,) = engine.run.offload, engine.planned_memory.peaks
        words = [str(off.offload_optimizer), str(off.offload_params), str(off.offload_gradients)]
        return words, peaks.device_bytes, [float(engine.step(BATCHES).loss) for _ in range(3)]


def test_a_placement_is_found_for_tp_ranks(tmp_path: Path) -> None:
    (tmp_path / "rates.yaml").write_text(RATES)
    first, second = run_ranks(2, placed_on_rank, str(tmp_path / "rates.yaml"))
    words, device_bytes, made = first
    assert first == second and set(words) != {"none"} and device_bytes <= 3_500_000
    assert made == pytest.approx(run_ranks(2, losses, {"tp": 2}, False)[0], rel=1e-5)


class Counted(nn.Module):
    """Takes a second of the test's clock for each output of its linear."""

    tp_plan: Mapping[str, str] = {"linear": "column gathered"}
    seconds = 0.0

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        Counted.seconds += self.linear.out_features
        return torch.tanh(self.linear(hidden))


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
        Counted.seconds += 5
        return self.linear(hidden).sum(), len(hidden)


def test_times_are_those_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return Counted.seconds

    monkeypatch.setattr(unit_times, "time", Clock)
    for tp, expected in ((1, [24.0, 12.0, 5.0]), (3, [8.0, 4.0, 5.0])):
        model = megazero.Model([Counted(5, 24), Counted(24, 12), Still()], input="x")
        run = run_of({"tp": tp}, "adamw", model, tp)
        assert unit_seconds(model, {"x": torch.ones(3, 5)}, run, HOST) == expected
