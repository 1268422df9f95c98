"""The fastest layouts of a run on a cluster, one for each split of its ranks.

Candidates are walked through in the order of a time that none falls below: the model's computations, shared out evenly
over the stages. Of each the next checks are made in the order of what they cost, and the first that it fails leaves it
out: the even share of its model state, the bound of its own stages (`plan.cluster.cluster_step.least_step`), the
memory of its stages, its simulation. The walk ends when the even share of all that is left is above the slowest layout
of those that are wanted. So what is left out is proven to be slower, or not to fit.
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
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.cluster_times import ClusterRates
from megazero.plan.cluster.least_memory import Activations, least_states, state_width
from megazero.plan.placement import EQUAL
from megazero.system.collector import without_collections

WANTED = 10
SLOW = 1.5
"""Times the fastest step: what takes longer is not shown."""


class Candidate(NamedTuple):
    """Settings of a split whose computations alone, shared out evenly, take `least` seconds."""

    least: float
    number: int
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
    """

    steps: list[ClusterStep]
    least: ClusterStep | None
    looked_at: int
    left_out: Counter[str] = field(default_factory=Counter)
    simulated: int = 0


@dataclass
class LayoutSearch:
    """A walk through the candidates of a run. wanted: number of splits."""

    asked: OpenRun
    wanted: int = WANTED
    best: dict[Split, ClusterStep] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    least: tuple[float, ClusterStep | None] = (inf, None)

    def run(self) -> BestLayouts:
        """The walk. Communicates nothing; the result depends on the run and the cluster alone."""
        looked_at = 0
        with without_collections():
            for offload in self.asked.offloads:
                candidates = self._candidates()
                looked_at += len(candidates)
                heapq.heapify(candidates)
                while candidates and candidates[0].least < self._worst:
                    self._try(heapq.heappop(candidates), offload)
                self.left_out["slower by its operations alone"] += len(candidates)
                if self.best:
                    break
        steps = sorted(self.best.values(), key=lambda step: step.seconds)[: self.wanted]
        return BestLayouts(steps, None if steps else self.least[1], looked_at, self.left_out, self.simulated)

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

    def _candidates(self) -> list[Candidate]:
        candidates = list[Candidate]()
        for split in self.asked.splits():
            for settings in self.asked.computed(split):
                micro_batches = self.asked.run.schedule.global_batch_size // (settings["micro_batch_size"] * split.dp)
                least = micro_batches * self._model_seconds(settings) / split.pp
                candidates.append(Candidate(least, len(candidates), split, settings))
        return candidates

    def _model_seconds(self, settings: Settings) -> float:
        """The seconds in which one rank computes all layers for a micro-batch."""
        names = ("tp", "micro_batch_size", "recompute_granularity", "sequence_parallel")
        key = tuple(settings[name] for name in names)
        if key not in self._known:
            whole = {name: settings[name] for name in names} | {"pp": 1, "virtual_stages": 1, "pipeline_schedule": None}
            run = self.asked.with_settings(whole)
            times = ClusterRates(self.asked.cluster).times(run, axes_of(run, run.parallel.tp), self.asked.kind)
            self._known[key] = sum(times.forward) + sum(times.backward)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[object, ...], float]:
        return {}

    def _try(self, candidate: Candidate, offload: Settings) -> None:
        """Keep the fastest of the candidate's placements, if it is faster than its split's so far."""
        kept: Activations | None = None
        for placement in self.asked.placed(candidate.split, offload):
            if not self._has_room(candidate.split, placement):
                self.left_out["its model state does not fit"] += 1
                continue
            run = self.asked.run_with({**candidate.settings, **placement})
            if run is None:
                self.left_out["not legal"] += 1
                continue
            step = ClusterStep(run, self.asked.cluster)
            kept = kept or Activations(run, step.axes, step.kind)  # the same of all placements
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
        return share * width.device <= device and share * width.away <= host
