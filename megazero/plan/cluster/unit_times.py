"""The seconds of each unit of a run (embedding, block, head) on a rank of a cluster, from its recorded work.

What overlaps in a unit is what its kernels overlap: messages over tp are counted behind the products, because their
kernels take processors from products beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from megazero.config.derive import NONE, RecomputeTable
from megazero.config.schema import Run
from megazero.model.stage import StageSpec
from megazero.pipeline.measured import MeasuredCase, read_by_a_unit, recorded
from megazero.pipeline.recorded import PassWork
from megazero.plan.activations import ActivationPlan
from megazero.plan.cluster.hardware import Cluster
from megazero.plan.cluster.kernels import Kernels, constants_of
from megazero.plan.cluster.messages import Messages, place_of


class UnitSeconds(NamedTuple):
    """Of one micro-batch. What backward computes again is in `backward`."""

    forward: float
    backward: float


class ChunkSeconds(NamedTuple):
    """The seconds of a chunk, and of both passes of each of its units in forward order."""

    forward: float
    backward: float
    units: tuple[float, ...]


@dataclass(frozen=True)
class UnitTimer:
    """Turns the units of a run into seconds. Equal units of runs are timed once in a process.

    plan  knows the body of attention of each block, and which blocks are equal
    """

    cluster: Cluster
    run: Run
    plan: ActivationPlan

    @cached_property
    def _read(self) -> Run:
        """What of the run the computation of a unit reads."""
        return read_by_a_unit(self.run)

    @cached_property
    def _node(self) -> Cluster:
        """The cluster without what does not matter to a unit."""
        return replace(self.cluster, gpus=min(self.cluster.gpus, self.cluster.nodes_of))

    @cached_property
    def _timed(self) -> dict[tuple[int, str], UnitSeconds]:
        """By number of a block, and what of it is computed again. A case is a slow key: it has a run's many fields."""
        return {}

    @cached_property
    def _ends(self) -> tuple[UnitSeconds, UnitSeconds]:
        """Those of the embedding and of the head."""
        return unit_seconds(self._embedding, self._node), unit_seconds(self._head, self._node)

    @cached_property
    def _chunks(self) -> dict[tuple[StageSpec, RecomputeTable], ChunkSeconds]:
        return {}

    def chunk(self, spec: StageSpec, table: RecomputeTable) -> ChunkSeconds:
        """Those of a chunk. table: what backward computes again of every block."""
        known = spec, table[spec.blocks.start : spec.blocks.stop]
        if known not in self._chunks:
            units = self.units(spec, table)
            forward, backward = (sum(getattr(unit, name) for unit in units) for name in UnitSeconds._fields)
            both = tuple(unit.forward + unit.backward for unit in units)
            self._chunks[known] = ChunkSeconds(forward, backward, both)
        return self._chunks[known]

    def units(self, spec: StageSpec, table: RecomputeTable) -> tuple[UnitSeconds, ...]:
        """Those of the units of a chunk, in forward order. table: what backward computes again of every block."""
        for key in ((number, table[number]) for number in spec.blocks):
            if key not in self._timed:
                self._timed[key] = unit_seconds(self._block(*key), self._node)
        blocks = tuple(self._timed[number, table[number]] for number in spec.blocks)
        return self._ends[:1] * spec.has_embedding + blocks + self._ends[1:] * spec.has_head

    def cases(self, spec: StageSpec, table: RecomputeTable) -> tuple[MeasuredCase, ...]:
        """What the units of a chunk are."""
        return (
            *[self._embedding] * spec.has_embedding,
            *(self._block(number, table[number]) for number in spec.blocks),
            *[self._head] * spec.has_head,
        )

    @property
    def _embedding(self) -> MeasuredCase:
        return self._case(StageSpec(range(0), True, False), NONE, graded=False)

    @property
    def _head(self) -> MeasuredCase:
        return self._case(StageSpec(range(0), False, True), NONE)

    def _block(self, number: int, again: str) -> MeasuredCase:
        first = self.plan.first_equal[number]
        # the gradient of its input is not wanted behind an embedding that is not trained
        graded = number > 0 or self.run.lora.lora_rank is None
        return self._case(StageSpec(range(first, first + 1), False, False), again, graded=graded)

    def _case(self, spec: StageSpec, again: str, *, graded: bool = True) -> MeasuredCase:
        return MeasuredCase(self._read, self.plan.bodies[spec.blocks.start], self.plan.kind, spec, again, graded)


@lru_cache(maxsize=512)
def unit_timer(cluster: Cluster, run: Run, plan: ActivationPlan) -> UnitTimer:
    """The timer of all runs whose units read the same (`pipeline.measured.read_by_a_unit`)."""
    return UnitTimer(cluster, run, plan)


@lru_cache(maxsize=1 << 14)
def unit_seconds(case: MeasuredCase, cluster: Cluster) -> UnitSeconds:
    """The seconds of a unit on a cluster, whose number of nodes does not matter."""
    work = recorded(case)
    constants = constants_of(cluster.device)
    kernels, messages = Kernels(cluster.device, constants), Messages(cluster, constants)
    place = place_of(case.run.parallel.tp, 1, cluster.nodes_of)

    def seconds(of_pass: PassWork) -> float:
        sent = sum(number * messages.collective(place, each.nbytes) for each, number in of_pass.messages.items())
        host = kernels.launching(of_pass, place.ranks)
        return kernels.together(host, kernels.computing(of_pass) + sent)

    return UnitSeconds(seconds(work.forward), seconds(work.backward))
