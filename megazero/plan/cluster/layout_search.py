"""The fastest layouts of a run on a cluster, one for each split of its ranks.

Candidates are walked through in the order of a time that none falls below: the model's operations, shared out evenly
over the stages, or the messages on its state. Of each the next checks are made in the order of what they cost, and the
first that it fails leaves it out: the least memory of its stages, the bound of its own stages
(`plan.cluster.cluster_step.least_step`), its simulation, its memory. The walk ends when all that is left takes at least
as long as the slowest layout of those that are wanted. So what is left out is slower, or does not fit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

from megazero.config.inventory import parameters
from megazero.mpu.axes import axes_of
from megazero.plan.cluster.candidates import OpenRun, Settings, Split
from megazero.plan.cluster.cluster_step import ClusterStep, least_messages
from megazero.plan.cluster.cluster_times import ClusterRates
from megazero.plan.cluster.least_memory import Activations, least_states, state_width
from megazero.plan.placement import EQUAL
from megazero.system.collector import without_collections

WANTED = 10
SLOW = 1.5
"""Times the fastest step: what takes longer is not shown."""


class Candidate(NamedTuple):
    """Settings of a split whose operations, shared out evenly over the stages, or whose messages take `least` seconds.

    computed  number of the settings that decide how long computations take, which several candidates share
    """

    least: float
    number: int
    computed: int
    split: Split
    settings: Settings


@dataclass
class BestLayouts:
    """The result of a search.

    steps      the fastest step of each split that fits, the fastest first
    least      the step that is nearest to what a device has, of those that do not fit; None if something fits
    looked_at  number of candidates
    left_out   number of candidates by the reason for which they were left out
    simulated  number of simulated steps
    state      bytes of model state that a rank has at least, in all tiers together
    """

    steps: list[ClusterStep]
    least: ClusterStep | None
    looked_at: int
    left_out: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    state: float = inf


@dataclass
class LayoutSearch:
    """A walk through the candidates of a run. wanted: number of splits."""

    asked: OpenRun
    wanted: int = WANTED
    best: dict[Split, ClusterStep] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    least: tuple[float, ClusterStep | None] = (inf, None)
    least_state: float = inf
    _kept: dict[int, Activations] = field(default_factory=dict)

    def run(self) -> BestLayouts:
        """The walk. Communicates nothing; the result depends on the run and the cluster alone."""
        looked_at = 0
        with without_collections():
            for offload in self.asked.offloads:
                candidates = self._candidates(offload)
                looked_at += len(candidates)
                self._kept = {}
                heapq.heapify(candidates)
                while candidates and candidates[0].least < self._worst:
                    self._try(heapq.heappop(candidates))
                self.left_out["slower by operations or messages alone"] += len(candidates)
                if self.best:
                    break
        steps = sorted(self.best.values(), key=lambda step: step.seconds)[: self.wanted]
        return BestLayouts(
            steps, None if steps else self.least[1], looked_at, self.left_out, self.simulated, self.least_state
        )

    @property
    def _worst(self) -> float:
        """The seconds that a layout of a new split has to stay below: those of the last that is wanted, and not so many
        that nobody would take it.
        """
        seconds = sorted(step.seconds for step in self.best.values())
        last = seconds[self.wanted - 1] if len(seconds) >= self.wanted else inf
        return min(last, SLOW * seconds[0]) if seconds else inf

    def _limit(self, split: Split) -> float:
        """The seconds that another layout of a split has to stay below. No prediction is so good that of two which are
        equal to a thousandth one were faster.
        """
        return min(self._worst, (1 - EQUAL) * self.best[split].seconds if split in self.best else inf)

    def _candidates(self, offload: Settings) -> list[Candidate]:
        candidates, computed = list[Candidate](), 0
        for split in self.asked.splits():
            placements = [each for each in self.asked.placed(split, offload) if self._has_room(split, each)]
            for settings in self.asked.computed(split):
                computed += 1
                micro_batches = self.asked.run.schedule.global_batch_size // (settings["micro_batch_size"] * split.dp)
                least = micro_batches * self._model_seconds(settings) / split.pp
                for placement in placements:
                    messages = self._message_seconds(split, settings, placement)
                    whole = {**settings, **placement}
                    candidates.append(Candidate(max(least, messages), len(candidates), computed, split, whole))
        return candidates

    def _message_seconds(self, split: Split, settings: Settings, placement: Settings) -> float:
        """The seconds of messages on the model state, at least."""
        names = ("pp", "tp", "pipeline_schedule", "virtual_stages", "micro_batch_size")
        key = split, *(settings[name] for name in names), *placement.values()
        if key not in self._known:
            run = self.asked.with_settings({**{name: settings[name] for name in names}, **placement})
            axes = axes_of(run, self.asked.cluster.gpus)
            self._known[key] = least_messages(run, axes, ClusterRates(self.asked.cluster).lanes(axes).per_byte)
        return self._known[key]

    def _model_seconds(self, settings: Settings) -> float:
        """The seconds in which one rank computes all layers for a micro-batch."""
        names = ("tp", "micro_batch_size", "recompute_granularity", "sequence_parallel")
        key = tuple(settings[name] for name in names)
        if key not in self._known:
            whole = {name: settings[name] for name in names} | {"pp": 1, "virtual_stages": 1, "pipeline_schedule": None}
            run = self.asked.with_settings(whole | {"activation_memory_budget": None})
            times = ClusterRates(self.asked.cluster).times(run, axes_of(run, run.parallel.tp), self.asked.kind)
            self._known[key] = sum(times.forward) + sum(times.backward)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[object, ...], float]:
        return {}

    def _try(self, candidate: Candidate) -> None:
        """Keep the step of a candidate, if it is faster than its split's so far."""
        if candidate.least >= self._limit(candidate.split):
            self.left_out["slower by operations or messages alone"] += 1
            return
        run = self.asked.run_with(candidate.settings)
        if run is None:
            self.left_out["not legal"] += 1
            return
        step = ClusterStep(run, self.asked.cluster)
        kept = self._kept.setdefault(candidate.computed, Activations(run, step.axes, step.kind))
        least = kept.least_tensors(least_states(run, step.axes), self.asked.rooms.device)
        if least > self.asked.rooms.device:
            self._misfits(step, least)
        else:
            self._look_at(step, candidate.split)

    def _look_at(self, step: ClusterStep, split: Split) -> None:
        """Keep the step if it fits, and is faster than its split's so far. What takes least is asked first."""
        limit = self._limit(split)
        if step.least_seconds >= limit:
            self.left_out["slower by the work of its stages"] += 1
            return
        if 2 * len(step.alike) < step.axes.pp and not step.fits:  # a few stages say so, and a simulation takes all
            self._misfits(step, step.tensors)
            return
        self.simulated += 1
        if step.short_seconds >= limit or step.seconds >= limit:
            self.left_out["slower in the simulation"] += 1
        elif not step.fits:
            self._misfits(step, step.tensors)
        else:
            self.best[split] = step

    def _misfits(self, step: ClusterStep, tensors: int) -> None:
        self.left_out["does not fit"] += 1
        if tensors < self.least[0]:
            self.least = tensors, step

    def _has_room(self, split: Split, placement: Settings) -> bool:
        """Whether an even share of the model state has room on a device and in host memory."""
        run = self.asked.with_settings(placement)
        share = parameters(run.model) / (split.tp * split.pp)
        width = state_width(run, placement["zero_shard_size"], split.dp)
        device, host = self.asked.rooms
        self.least_state = min(self.least_state, share * (width.device + width.away))
        return share * width.device <= device and share * width.away <= host
