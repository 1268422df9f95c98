"""megazero with --placement auto. Its report says what was chosen, and the rates by which."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from bench.contestants.megazero_ import build_megazero, step_of
from bench.workload import Workload
from megazero.config.dump import plain_value
from megazero.config.placement import ROWS
from megazero.plan.step_times import MachineRates
from megazero.train import checked
from megazero.train.job import Job


class Step:
    """One optimizer step."""

    def __init__(self, job: Job, rates: dict[str, float], told: tuple[str, ...]) -> None:
        self.job, self.rates, self.told, self.step = job, rates, told, step_of(job.trainer)

    def __call__(self) -> Any:
        return self.step()

    def report(self) -> dict[str, Any]:
        """The settings of the placement, the rates that were measured, and what the banner says."""
        settings = {**vars(self.job.run.parallel), **vars(self.job.run.offload)}
        chosen = {row.field: plain_value(settings[row.field]) for row in ROWS.values()}
        return {"settings": chosen, "rates": self.rates, "told": self.told}


def build(work: Workload, layout: tuple[str, ...] = (), replicas: int = 1) -> Step:
    rates: dict[str, float] = {}
    measure = checked.measured_rates

    def measured(*of: Any) -> MachineRates:
        result = measure(*of)
        rates.update(result.plain())
        return result

    with patch.object(checked, "measured_rates", measured):
        job = build_megazero(work, list(layout), replicas)
    return Step(job, rates, job.prepared.resolved.placement)
