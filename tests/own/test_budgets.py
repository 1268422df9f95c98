"""Budgets of memory of a user's model: a run is refused before its first step, with numbers and a change that fits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import megazero
from megazero.config.source import ConfigError
from tests.own.models import Batch
from tests.own.test_step_memory import MICRO_BATCHES, MODELS, planned_peaks
from tests.ranks import run_ranks

CASE = MODELS["transformer"]


def batches() -> list[Batch]:
    return [CASE.batch(torch.Generator().manual_seed(number)) for number in range(MICRO_BATCHES)]


def engine_of(run: dict[str, Any]) -> megazero.Engine:
    return megazero.engine(CASE.model(), run=run, example=batches())


def refused(run: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        engine_of(run)
    return str(error.value)


def test_a_run_keeps_its_budget_to_the_byte() -> None:
    (peaks,) = planned_peaks(CASE, {}, 1)
    with engine_of({"device_memory_budget": peaks.total_bytes}) as engine:
        assert engine.planned_memory is not None
        (held,) = engine.planned_memory.peaks
        assert held == peaks
        assert "of offload.device_memory_budget 4.54 MiB" in str(engine.planned_memory)
        engine.step(batches())
    told = refused({"device_memory_budget": peaks.total_bytes - 1})
    assert f"offload.device_memory_budget {peaks.total_bytes - 1:,}: a rank takes {peaks.total_bytes:,} bytes" in told


def test_what_is_offered_fits() -> None:
    budget = 4_000_000
    told = refused({"device_memory_budget": budget})
    found = re.search(r"nearest: parallel.recompute_granularity full \(([\d,]+) bytes of memory", told)
    assert found is not None, told
    with engine_of({"device_memory_budget": budget, "recompute_granularity": "full"}) as engine:
        assert engine.planned_memory is not None
        assert [each.total_bytes for each in engine.planned_memory.peaks] == [int(found[1].replace(",", ""))]


def test_a_host_has_a_budget_of_its_own() -> None:
    told = refused({"host_memory_budget": 1_000_000, "offload_optimizer": "cpu"})
    assert re.search(r"offload.host_memory_budget 1,000,000: a rank takes [\d,]+ bytes of host memory: ", told), told
    assert "nearest: offload.offload_optimizer none" in told
    engine_of({"host_memory_budget": 2_100_000, "offload_optimizer": "cpu"}).close()


def test_a_budget_needs_an_example() -> None:
    with pytest.raises(ConfigError, match=r"run has device_memory_budget and host_memory_budget: .* without example="):
        megazero.engine(CASE.model(), run={"device_memory_budget": "1GB", "host_memory_budget": "1GB"})
    with megazero.engine(CASE.model()) as engine:
        assert engine.planned_memory is not None and not engine.planned_memory.peaks
        assert "is not known: nothing has been measured" in str(engine.planned_memory)


def told_to_rank(rank: int, run: dict[str, Any]) -> str:
    try:
        engine_of(run).close()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("run", [{"pp": 2}, {"zero_stage": 1}], ids=str)
def test_all_ranks_are_refused(run: dict[str, Any]) -> None:
    peaks = planned_peaks(CASE, run, 2)
    most = max(peaks, key=lambda stage: stage.total_bytes)
    assert not any(run_ranks(2, told_to_rank, {**run, "device_memory_budget": most.total_bytes}))
    for told in run_ranks(2, told_to_rank, {**run, "device_memory_budget": most.total_bytes - 1}):
        assert f"takes {most.total_bytes:,} bytes of memory" in told
        assert f"stage {most.stage} of 2" in told or "pp" not in run


def test_measuring_leaves_no_trace() -> None:
    """Neither in the values, nor in what is drawn behind it, nor in the training."""

    def trained(**how: Any) -> tuple[float, dict[str, Tensor], Tensor]:
        model = CASE.model()
        with megazero.engine(model, **how) as engine:
            drawn = torch.rand(3)
            losses = [float(engine.step(batches()).loss) for _ in range(2)]
            return losses[-1], engine.state_dict(), drawn

    plain, measured = trained(), trained(example=batches())
    assert plain[0] == measured[0] and torch.equal(plain[2], measured[2])
    assert all(torch.equal(value, measured[1][name]) for name, value in plain[1].items())


class Samples:
    """Sentences as samples."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Batch:
        return {"x": torch.randint(0, 500, (32,), generator=torch.Generator().manual_seed(number))}


def test_megazeros_loop_keeps_budgets_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    loop = {"micro_batch_size": 4, "global_batch_size": 16, "train_iters": 1, "num_workers": 0}
    (peaks,) = planned_peaks(CASE, {}, 1)
    budget = {"device_memory_budget": peaks.total_bytes}
    with megazero.training({**loop, **budget}, model=CASE.model(), data=Samples()) as run:
        for _ in run.steps():
            pass
    printed = capsys.readouterr().out
    assert "Memory of the model state, ZeRO-0" in printed and "6 units" in printed
    assert (
        "A step takes 4.54 MiB on the device of a rank; 4.54 MiB of memory of offload.device_memory_budget" in printed
    )
    budget = {"device_memory_budget": peaks.total_bytes - 1}
    begun = megazero.training({**loop, **budget}, model=CASE.model(), data=Samples())
    with pytest.raises(ConfigError, match=r"nearest: parallel\.recompute_granularity full"), begun:
        pass
    with megazero.training(loop, model=CASE.model(), data=Samples()) as run:
        for _ in run.steps():
            pass
    assert "is not known: nothing has been measured" in capsys.readouterr().out
