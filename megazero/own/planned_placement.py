"""`placement` "auto" of a user's model: what lies where is found by simulating its step, in which units take the
seconds that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.own.planned_step import OwnPlannedModel
from megazero.own.settings import run_problems
from megazero.plan.placed_step import Machine
from megazero.plan.step_times import MachineRates, read_rates
from megazero.program.instruction import Lane
from megazero.program.times import ChunkTimes
from megazero.train.placed import ChosenPlacement, Room, chosen_on

FORWARD = 1 / 3
"""The share of a unit's seconds that its forward takes: a backward takes twice as long."""


@dataclass(frozen=True)
class OwnTimes:
    """A `plan.placed_step.TimeModel`: seconds of units, and of all else by rates.

    seconds  of the forward and the backward of each unit, in model order
    """

    rates: MachineRates
    model: OwnPlannedModel
    seconds: Sequence[float]

    @property
    def has_disks(self) -> bool:
        return self.rates.has_disks

    def times(self, run: Run, axes: Axes, kind: str) -> ChunkTimes:
        units = tuple(tuple(self.seconds[number] for number in chunk) for chunk in self.model.chunks.chunks)
        whole, per_byte = [sum(chunk) for chunk in units], self.rates.seconds_per_byte
        return ChunkTimes(
            tuple(FORWARD * seconds for seconds in whole),
            tuple((1 - FORWARD) * seconds for seconds in whole),
            self.model.largest_message(run) * per_byte[Lane.ACROSS],
            units=units,
            per_byte=per_byte,
            update=1 / self.rates.update,
            beside=1.0 if self.rates.beside is None else self.rates.beside,
        )


@dataclass(frozen=True, eq=False)
class OwnMachine(Machine):
    """A machine on which a model of so many units runs."""

    units: int = field(kw_only=True)

    def problems(self, run: Run) -> Sequence[str]:
        return [*run_problems(run, self.axes.world_size, self.units)]


def chosen_for(
    model: OwnPlannedModel, run: Run, axes: Axes, kind: str, seconds: Callable[[], Sequence[float]], room: Room | None
) -> ChosenPlacement:
    """The placement of a run at the rates of its file. seconds: measures its units. kind: of device, cpu or cuda.

    Communicates nothing. Raises ConfigError if nothing keeps to the budgets, or the file has no rates.
    """
    assert run.offload.placement_rates is not None, "validated: placement auto has a file of rates"
    rates = read_rates(run.offload.placement_rates)
    times = OwnTimes(rates, model, seconds())
    units = len(model.chunks.names)
    return chosen_on(OwnMachine(run, axes, kind, times, nccl=False, model=model, units=units), rates, room)
