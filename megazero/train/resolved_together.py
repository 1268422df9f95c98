"""What only ranks that have met can decide: the order of micro-batches on cards, and a placement at measured rates."""

from __future__ import annotations

import json
from dataclasses import replace

from megazero.checkpoint.agreement import broadcast_text, raise_on_all_ranks
from megazero.config.dump import plain_value
from megazero.config.placement import AUTO
from megazero.config.source import ConfigError, Decision
from megazero.mpu.grid import ProcessGrid
from megazero.plan.rates import read_rates
from megazero.train.measured_rates import measured_rates
from megazero.train.placed import room_here
from megazero.train.resolve import Facts, ResolvedRun, decided, resolve


def resolved_on_all_ranks(started: ResolvedRun, grid: ProcessGrid, ranks_here: int) -> ResolvedRun:
    """The final run: what the ranks' files have left open is decided on rank 0, and every rank takes its decisions.

    Rank 0 alone, because the search for a placement takes seconds of all cores, and because two cards may keep
    different bytes of attention. ranks_here: the ranks of this host, which share its memory and its disks. If something
    is open this is a collective of the world: an all-reduce and a broadcast, and for --placement auto without
    --placement-rates the measurement (`train.measured_rates`). Raises ConfigError on all ranks if nothing keeps to the
    budgets.
    """
    if not started.left_open:
        return started
    facts = _asked_together(started, grid, ranks_here)
    answer: dict[str, object] = {}
    failure: Exception | None = None
    if grid.rank == 0:
        try:
            answer = _as_words(resolve(started.asked, facts))
        except ConfigError as error:
            answer = {"problems": error.problems}
        except Exception as error:
            failure = error
    raise_on_all_ranks(grid.world, grid.device, failure)
    told = json.loads(broadcast_text(grid.world, grid.device, json.dumps(answer)) or "{}")
    if "problems" in told:
        raise ConfigError(told["problems"])
    decisions = tuple(Decision(*decision) for decision in told["decisions"])
    resolved = decided(started.asked, facts, decisions, tuple(told["placement"]))
    assert not resolved.left_open, resolved.left_open
    return resolved


def _asked_together(started: ResolvedRun, grid: ProcessGrid, ranks_here: int) -> Facts:
    """The facts with what the ranks learn when they have met."""
    run, facts = started.run, replace(started.facts, tries_kernels=True, nccl=grid.world.is_on_device)
    if run.offload.placement != AUTO:
        return facts
    file = run.offload.placement_rates
    rates = measured_rates(run, grid) if file is None else read_rates(file)
    return replace(facts, rates=rates, room=room_here(run, ranks_here))


def _as_words(resolved: ResolvedRun) -> dict[str, object]:
    """Decisions as JSON has them; `config.placement.applied` reads values from their words."""
    decisions = [(decision.field, plain_value(decision.value), decision.why) for decision in resolved.decisions]
    return {"decisions": decisions, "placement": resolved.placement}
