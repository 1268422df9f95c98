"""placement "auto" of a user's model: a search over simulated steps says what lies where, on all ranks alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megazero
from megazero.config.source import ConfigError
from megazero.config.tiers import Tier
from megazero.own.planned_placement import OwnTimes
from megazero.own.planned_state import OwnChunks, own_axes
from megazero.own.planned_step import OwnPlannedModel
from megazero.own.settings import run_of
from megazero.own.unit_bytes import unit_bytes
from megazero.plan.step_times import ASSUMED
from megazero.program.instruction import Lane
from tests.own.test_budgets import CASE, Samples, batches, refused
from tests.ranks import run_ranks

RATES = "{flops: 1e11, to_host: 8GB, to_device: 8GB, update: 20GB, update_host: 2GB}"
BUDGETS = {"device_memory_budget": 4_000_000, "host_memory_budget": 5_000_000}


@pytest.fixture
def rates(tmp_path: Path) -> str:
    path = tmp_path / "rates.yaml"
    path.write_text(RATES)
    return str(path)


def placed(rates: str, **more: Any) -> dict[str, Any]:
    return {"placement": "auto", "placement_rates": rates, **more}


def found_on_rank(rank: int, run: dict[str, Any]) -> tuple[str, int, float]:
    """The placement, the most bytes on the device of any stage, and the loss of a second step."""
    with megazero.engine(CASE.model(), run=run, example=batches()) as engine:
        assert engine.planned_memory is not None
        most = max(stage.device_bytes for stage in engine.planned_memory.peaks)
        losses = [float(engine.step(batches()).loss) for _ in range(2)]
        off = engine.run.offload
        words = f"{off.offload_optimizer} {off.offload_params} {off.offload_gradients} {off.offload_activations}"
        assert off.placement == "flags" and off.placement_rates is None
        return words, most, losses[-1]


def test_a_placement_keeps_the_budget_and_the_training(rates: str) -> None:
    everything_here, most, loss = found_on_rank(0, {})
    assert most > BUDGETS["device_memory_budget"]
    words, less, again = found_on_rank(0, placed(rates, **BUDGETS))
    assert words != everything_here and less <= BUDGETS["device_memory_budget"]
    assert again == pytest.approx(loss, rel=1e-5)


def test_without_budgets_slow_hosts_update_nothing(rates: str) -> None:
    with megazero.engine(CASE.model(), run=placed(rates), example=batches()) as engine:
        assert engine.run.offload.offload_optimizer.tier is Tier.DEVICE
        told = str(engine.planned_memory)
    assert "placement: predicted: a step of" in told and "steps were simulated" in told


def test_all_ranks_take_one_placement(rates: str) -> None:
    first, second = run_ranks(2, found_on_rank, placed(rates, pp=2, device_memory_budget=2_000_000, **HOST))
    assert first == second and first[0] != "none none none none" and first[1] <= 2_000_000


HOST = {"host_memory_budget": 5_000_000}


def test_what_cannot_be_placed_is_told(rates: str, tmp_path: Path) -> None:
    told = refused(placed(rates, device_memory_budget=1_000_000, **HOST))
    assert re.search(
        r"offload.device_memory_budget 1,000,000: no placement keeps to it; the least .* [\d,]+ bytes", told
    )
    assert "offload_optimizer cpu and the run: placement auto, which chooses it" in refused(
        placed(rates, offload_optimizer="cpu")
    )
    assert "placement 'auto' needs placement_rates" in refused({"placement": "auto"})
    assert "placement_rates is without effect" in refused({"placement_rates": rates})
    with pytest.raises(ConfigError, match=r"run has placement and placement_rates: .* without example="):
        megazero.engine(CASE.model(), run=placed(rates))
    (tmp_path / "wrong.yaml").write_text("{flops: 1e11}")
    assert "to_host, to_device, update, update_host: missing" in refused(placed(str(tmp_path / "wrong.yaml")))


def test_a_file_places_without_an_example(tmp_path: Path) -> None:
    path = tmp_path / "placed.yaml"
    path.write_text("{optimizer: {tier: cpu, share: 0.5}, late_update: true}")
    with megazero.engine(CASE.model(), run={"placement": str(path)}) as engine:
        off = engine.run.offload
        assert (off.offload_optimizer.tier, off.offload_optimizer.share) == (Tier.HOST, 0.5)
        assert engine.run.parallel.late_update
    path.write_text("{early_update: true}")
    with pytest.raises(ConfigError, match="run has early_update: a model of modules reads none of these"):
        megazero.engine(CASE.model(), run={"placement": str(path)})


def test_megazeros_loop_is_placed(rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    loop = {"micro_batch_size": 4, "global_batch_size": 16, "train_iters": 1, "num_workers": 0}
    with megazero.training({**loop, **placed(rates, **BUDGETS)}, model=CASE.model(), data=Samples()) as run:
        for _ in run.steps():
            pass
    assert "placement: takes, of a rank: device" in capsys.readouterr().out


def test_times_are_those_of_the_units() -> None:
    model = CASE.model()
    run = run_of({"pp": 2}, "adamw", model, 2)
    measured = unit_bytes(model, batches()[0], run, torch.device("cpu"))
    own = OwnPlannedModel(OwnChunks.of(model, run), lambda _: measured)
    seconds = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    times = OwnTimes(ASSUMED["cpu"], own, seconds).times(run, own_axes(model, run, 2), "cpu")
    assert sum(times.forward) + sum(times.backward) == pytest.approx(63)
    assert times.backward == pytest.approx([2 * forward for forward in times.forward])
    assert times.units is not None and [each for chunk in times.units for each in chunk] == seconds
    message = 4096 + 32768  # the mask, and the hidden state
    assert times.message == pytest.approx(message * ASSUMED["cpu"].seconds_per_byte[Lane.ACROSS])
