"""The fastest layouts of a run on a cluster, one for each split of its ranks.

Candidates are walked through in the order of a time that none falls below. At first it is that of the model's
operations, shared out evenly over the stages, or of the messages on its state. A candidate whose turn has come, and
whose stages have room for the least that they hold, gets the time of its schedule without messages on model state, and
takes its turn by that. When that turn has come its fullest stage has to have room, and where messages on model state
come with each micro-batch it takes one more turn, by a short step with these. Then it is simulated. The walk ends when
all that is left takes at least as long as the slowest layout of those that are wanted. So what is left out is slower,
or does not fit; or it sends more than another one that fits, with the same computations: what ZeRO-2 sends comes on top
of what ZeRO-1 sends, and what ZeRO-3 sends on top of that, where no stage waits for copies or for buckets of a size
that the user sets, and there are more micro-batches than stages. A candidate that sends more waits for the turns of
those that send less.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

from megazero.config.derive import leaving
from megazero.config.inventory import parameters
from megazero.mpu.axes import axes_of
from megazero.plan.cluster.candidates import OpenRun, Settings, Split
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.least_memory import LeastMemory, StateWidth, state_width
from megazero.plan.cluster.least_seconds import least_messages
from megazero.plan.placement import EQUAL
from megazero.system.collector import without_collections

WANTED = 10
SLOW = 1.5
"""Times the fastest step: what takes longer is not shown."""
BY_OPERATIONS = "slower by operations or messages alone"
BY_SCHEDULE = "slower by the schedule of its stages"
SIMULATED = "slower in the simulation"
SENT_ONCE, MOST_STAGE = 1, 3
"""Stages of ZeRO: the first one that shards, and the last one."""


class Candidate(NamedTuple):
    """Settings of a split.

    computed  number of the settings that decide how long computations take, which several candidates share
    """

    computed: int
    split: Split
    settings: Settings

    @property
    def zero_stage(self) -> int:
        stage: int = self.settings["zero_stage"]
        return stage

    @property
    def rivals(self) -> tuple[object, ...]:
        """What it shares with candidates that differ in the ZeRO stage alone."""
        return self.computed, self.settings["zero_shard_size"]


class Turn(NamedTuple):
    """A candidate that takes `least` seconds at least. step: once its bound is that of its schedule; is_begun: once it
    is that of a short step.
    """

    least: float
    number: int
    candidate: Candidate
    step: ClusterStep | None = None
    is_begun: bool = False

    @property
    def why_slow(self) -> str:
        """What has found the bound."""
        return SIMULATED if self.is_begun else BY_OPERATIONS if self.step is None else BY_SCHEDULE


class StateShare(NamedTuple):
    """Bytes of model state of a rank: what is short, on its device, and in host memory."""

    short: float
    device: float
    away: float


NO_STATE = StateShare(inf, inf, inf)
"""Where no layout was looked at."""


@dataclass
class BestLayouts:
    """The result of a search.

    steps      the fastest step of each split that fits, the fastest first
    least      the step that is nearest to what a device has, of those that do not fit; None if something fits
    looked_at  number of candidates
    left_out   number of candidates by the reason for which they were left out
    simulated  number of simulated steps
    state      the model state of a rank that is nearest to what a device and its share of host memory have
    """

    steps: list[ClusterStep]
    least: ClusterStep | None
    looked_at: int
    left_out: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    state: StateShare = NO_STATE


@dataclass
class LayoutSearch:
    """A walk through the candidates of a run. wanted: number of splits."""

    asked: OpenRun
    wanted: int = WANTED
    best: dict[Split, ClusterStep] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    least: tuple[float, ClusterStep | None] = (inf, None)
    nearest_state: StateShare = NO_STATE
    _kept: dict[int, LeastMemory] = field(default_factory=dict)
    _turns: list[Turn] = field(default_factory=list)
    _fitting: dict[tuple[object, ...], int] = field(default_factory=dict)
    """By what rivals share the least ZeRO stage that fits, of those that shard."""
    _waiting: dict[tuple[object, ...], dict[int, float]] = field(default_factory=dict)
    """By what rivals share, and by ZeRO stage, the bounds of those that wait for another turn."""

    def run(self) -> BestLayouts:
        """The walk. Communicates nothing; the result depends on the run and the cluster alone."""
        looked_at = 0
        with without_collections():
            for offload in self.asked.offloads:
                self._turns = self._first_turns(offload)
                looked_at += len(self._turns)
                self._kept, self._fitting, self._waiting = {}, {}, {}
                heapq.heapify(self._turns)
                while self._turns and self._turns[0].least < self._worst:
                    self._take(heapq.heappop(self._turns))
                self.left_out.update(turn.why_slow for turn in self._turns)
                if self.best:
                    break
        steps = sorted(self.best.values(), key=lambda step: step.seconds)[: self.wanted]
        return BestLayouts(
            steps, None if steps else self.least[1], looked_at, self.left_out, self.simulated, self.nearest_state
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

    def _first_turns(self, offload: Settings) -> list[Turn]:
        turns, computed = list[Turn](), 0
        for split in self.asked.splits():
            placements = [each for each in self.asked.placed(split, offload) if self._has_room(split, each)]
            for settings in self.asked.computed(split):
                computed += 1
                micro_batches = self.asked.run.schedule.global_batch_size // (settings["micro_batch_size"] * split.dp)
                least = micro_batches * self._model_seconds(settings) / split.pp
                for placement in placements:
                    messages = self._message_seconds(split, settings, placement)
                    candidate = Candidate(computed, split, {**settings, **placement})
                    turns.append(Turn(max(least, messages), len(turns), candidate))
        return turns

    def _message_seconds(self, split: Split, settings: Settings, placement: Settings) -> float:
        """The seconds of messages on the model state, at least."""
        names = ("pp", "tp", "pipeline_schedule", "virtual_stages", "micro_batch_size")
        key = split, *(settings[name] for name in names), *placement.values()
        if key not in self._known:
            run = self.asked.with_settings({**{name: settings[name] for name in names}, **placement})
            axes = axes_of(run, self.asked.cluster.gpus)
            self._known[key] = least_messages(run, axes, self.asked.rates.lanes(axes).per_byte)
        return self._known[key]

    def _model_seconds(self, settings: Settings) -> float:
        """The seconds in which one rank computes all layers for a micro-batch."""
        names = ("tp", "micro_batch_size", "recompute_granularity", "sequence_parallel")
        key = tuple(settings[name] for name in names)
        if key not in self._known:
            whole = {name: settings[name] for name in names} | {"pp": 1, "virtual_stages": 1, "pipeline_schedule": None}
            run = self.asked.with_settings(whole | {"activation_memory_budget": None})
            times = self.asked.rates.times(run, axes_of(run, run.parallel.tp), self.asked.kind)
            self._known[key] = sum(times.forward) + sum(times.backward)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[object, ...], float]:
        return {}

    def _push(self, turn: Turn) -> None:
        """Give a candidate another turn."""
        self._waiting.setdefault(turn.candidate.rivals, {})[turn.candidate.zero_stage] = turn.least
        heapq.heappush(self._turns, turn)

    def _take(self, turn: Turn) -> None:
        """Give a candidate its next bound; or keep its step, if it is faster than its split's so far."""
        candidate = turn.candidate
        self._waiting.get(candidate.rivals, {}).pop(candidate.zero_stage, None)
        if turn.least >= self._limit(candidate.split):
            self.left_out[turn.why_slow] += 1
            if turn.is_begun:
                self._note(candidate)
        elif self._sends_more(candidate, self._fitting.get(candidate.rivals, MOST_STAGE)):
            self.left_out["sends more than a lower ZeRO stage"] += 1
        elif turn.step is not None:
            self._look_at(turn.step, turn)
        elif (step := self._roomy(candidate)) is not None:
            self._bound(step, turn)

    def _sends_more(self, candidate: Candidate, stage: int) -> bool:
        """Whether it is slower than its rival of this ZeRO stage, because it sends more. ZeRO-3 gathers unit by unit:
        where other stages wait for copies or for large buckets, or have too few micro-batches to hide the gathers of a
        step's begin, it may be faster for all that it sends.
        """
        if not SENT_ONCE <= stage < candidate.zero_stage:
            return False
        if candidate.zero_stage == MOST_STAGE and self._micro_batches(candidate) <= candidate.split.pp:
            return False
        run = self.asked.with_settings(candidate.settings)
        waits = any(leaving(run).values()) or self.asked.run.parallel.bucket_size is not None
        return candidate.zero_stage < MOST_STAGE or not waits

    def _micro_batches(self, candidate: Candidate) -> int:
        size: int = candidate.settings["micro_batch_size"]
        return self.asked.run.schedule.global_batch_size // (size * candidate.split.dp)

    def _rivals_least(self, candidate: Candidate) -> float:
        """The seconds that rivals take at least which send less, and wait for their turns."""
        waiting = self._waiting.get(candidate.rivals, {})
        return max((least for stage, least in waiting.items() if self._sends_more(candidate, stage)), default=0.0)

    def _roomy(self, candidate: Candidate) -> ClusterStep | None:
        """The step of a candidate, if it is legal and the least that it holds has room."""
        run = self.asked.run_with(candidate.settings)
        if run is None:
            self.left_out["not legal"] += 1
            return None
        step = ClusterStep(run, self.asked.cluster, self.asked.program)
        kept = self._kept.setdefault(candidate.computed, LeastMemory(run, step.axes, step.kind))
        width, (device, host) = _width(step), self.asked.rooms
        least = kept.tensors(width, device)
        if least <= device and kept.away(width) <= host:
            return step
        self._misfits(step, least)
        return None

    def _bound(self, step: ClusterStep, turn: Turn) -> None:
        """Give a candidate another turn, by the time of its schedule."""
        limit = self._limit(turn.candidate.split)
        if step.least_seconds >= limit or step.scheduled_least >= limit:
            self.left_out[BY_SCHEDULE] += 1
        else:
            least = max(turn.least, step.least_seconds, step.scheduled_least)
            self._push(turn._replace(least=least, step=step))

    def _look_at(self, step: ClusterStep, turn: Turn) -> None:
        """Simulate a step whose fullest stage has room; or give it one more turn, if a short step takes longer, or
        behind a rival that sends less.
        """
        limit = self._limit(turn.candidate.split)
        if (least := self._rivals_least(turn.candidate)) > turn.least:
            self._push(turn._replace(least=least))
            return
        if step.scheduled >= limit:
            self.left_out[BY_SCHEDULE] += 1
            return
        if not turn.is_begun:
            fullest = self._kept[turn.candidate.computed].fullest(_width(step))
            if not step.has_room(fullest):
                self._misfits(step, step.tensors_of(fullest))
                return
            if step.begun_least > turn.least:
                self._push(turn._replace(least=step.begun_least, is_begun=True))
                return
        self._simulate(step, turn.candidate, limit)

    def _simulate(self, step: ClusterStep, candidate: Candidate, limit: float) -> None:
        """Keep the step if it is faster than its split's so far, and fits."""
        self.simulated += 1
        if step.seconds >= limit:
            self.left_out[SIMULATED] += 1
            self._note(candidate)
        elif not step.fits:
            self._misfits(step, step.tensors)
        else:
            self.best[candidate.split] = step
            self._note(candidate)

    def _note(self, candidate: Candidate) -> None:
        """Leave out rivals that send more, and are slower than what is known."""
        if candidate.zero_stage >= SENT_ONCE:
            stage = self._fitting.get(candidate.rivals, MOST_STAGE)
            self._fitting[candidate.rivals] = min(candidate.zero_stage, stage)

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
        on_device, away = share * width.device, share * width.away
        short = max(0.0, on_device - device) + max(0.0, away - host)
        self.nearest_state = min(self.nearest_state, StateShare(short, on_device, away))
        return short == 0


def _width(step: ClusterStep) -> StateWidth:
    return state_width(step.run, step.axes.shard_size, step.axes.dp * step.axes.cp)
