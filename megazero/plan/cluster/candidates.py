"""The layouts that a search looks at: what is open of a run, and the values that each open setting may have.

What the user says is fixed. A `Split` is how ranks share the model: tp, pp and so dp. A candidate is a split with the
rest: schedule and virtual stages, micro-batch, recompute, sequence parallelism, ZeRO and its shards, and what leaves
the device. Of what is equally fast the simpler one comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from megazero.config.layers.kinds import layers
from megazero.config.placement import applied
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.config.validate import problems_of
from megazero.mpu.axes import axes_of
from megazero.plan.cluster.beside_tensors import allowance_of
from megazero.plan.cluster.cluster_times import ClusterRates
from megazero.plan.cluster.hardware import Cluster
from megazero.plan.cluster.programs import OURS, Program
from megazero.plan.recompute import recompute_table

Settings = dict[str, Any]
"""Field of a run -> value."""

MOST_MICRO_BATCH = 16
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
VIRTUAL = (2, 4, 8)
"""Virtual stages of interleaved schedules. More of them send more messages than their smaller bubble is worth."""
RECOMPUTE = ("none", "selective", "full")
ZERO = (1, 0, 2, 3)
"""ZeRO-1 sends what ZeRO-0 sends, and takes less."""
OFFLOADS: tuple[Settings, ...] = (
    {},
    {"offload_optimizer": "cpu"},
    {"offload_optimizer": "cpu", "offload_activations": "cpu"},
    {"offload_optimizer": "cpu", "offload_gradients": "cpu", "offload_params": "cpu"},
)
"""From what moves least to what moves most."""


class Split(NamedTuple):
    """How ranks share the model."""

    tp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}"


class Rooms(NamedTuple):
    """Bytes of tensors on a device, and in host memory."""

    device: float
    host: float


@dataclass(frozen=True)
class OpenRun:
    """A run, the cluster, and which of its settings are fixed.

    run      as the user asks for it, with the defaults of what is open
    fixed    fields that the user sets
    program  which is to run it
    """

    run: Run
    cluster: Cluster
    fixed: Set[str]
    program: Program = OURS

    @classmethod
    def of(cls, run: Run, cluster: Cluster, fixed: Set[str], program: Program = OURS) -> OpenRun:
        """Without a ramp of the global batch: a plan is for steps of the whole batch, which a ramp only reaches."""
        return cls(replace(run, schedule=replace(run.schedule, rampup_batch_size=None)), cluster, fixed, program)

    @property
    def rates(self) -> ClusterRates:
        return ClusterRates(self.cluster, self.program)

    def values(self, field: str, values: Iterator[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of a field that the program has: the user's alone, where there is one."""
        for section in (self.run.parallel, self.run.schedule, self.run.offload):
            if field in self.fixed and hasattr(section, field):
                return (getattr(section, field),)
        return tuple(value for value in values if self.program.has(field, value))

    def splits(self) -> list[Split]:
        """The splits of the ranks: tp within a node, stages that each have a layer."""
        gpus, units = self.cluster.gpus, self.run.model.num_layers + 2
        splits = list[Split]()
        for tp in self.values("tp", _divisors(gpus, min(self.cluster.nodes_of, gpus))):
            if gpus % tp or not self._divides({"tp": tp}):
                continue
            for pp in self.values("pp", _divisors(gpus // tp, units)):
                if gpus % (tp * pp) == 0:
                    splits.append(Split(tp, pp, gpus // (tp * pp)))
        return splits

    def batches(self, split: Split) -> tuple[int, ...]:
        """Micro-batch sizes that divide a replica's share of the global batch."""
        whole = self.run.schedule.global_batch_size
        if whole % split.dp:
            return ()
        share = whole // split.dp
        sizes = self.values("micro_batch_size", _divisors(share, MOST_MICRO_BATCH))
        return tuple(size for size in sizes if share % size == 0)

    def orders(self, split: Split) -> Iterator[Settings]:
        """Schedules with their virtual stages."""
        if split.pp == 1 and not {"pipeline_schedule", "virtual_stages"} & self.fixed:
            yield {"pipeline_schedule": None, "virtual_stages": 1}
            return
        most = len(layers(self.run.model)) // split.pp
        chunks = {
            "1f1b": (1,),
            "interleaved": tuple(v for v in VIRTUAL if v <= most),
            "zb-h1": (1,),
            "zb-v": (2,),
            "gpipe": (1,) if "pipeline_schedule" in self.fixed else (),
        }
        for schedule in self.values("pipeline_schedule", SCHEDULES):
            name = schedule or ("1f1b" if self.run.parallel.virtual_stages == 1 else "interleaved")
            for virtual in self.values("virtual_stages", chunks[name]):
                yield {"pipeline_schedule": name, "virtual_stages": virtual}

    def computed(self, split: Split) -> Iterator[Settings]:
        """What decides how long a split's computations and messages between stages take."""
        sequence = [
            shared
            for shared in self.values("sequence_parallel", (True, False) if split.tp > 1 else (False,))
            if self._divides({"tp": split.tp, "sequence_parallel": shared})
        ]
        for order, batch, again, shared in product(
            self.orders(split),
            self.batches(split),
            self.values("recompute_granularity", RECOMPUTE),
            sequence,
        ):
            if order["pipeline_schedule"] == "interleaved" and order["virtual_stages"] < 2:
                continue
            settings = {
                "tp": split.tp,
                "pp": split.pp,
                **order,
                "micro_batch_size": batch,
                "recompute_granularity": again,
                "sequence_parallel": shared,
            }
            if self._keeps_activations(settings):
                yield settings

    def _keeps_activations(self, settings: Settings) -> bool:
        """Whether something can be computed again with which the user's budget of activations is kept, if there is
        one.
        """
        if self.run.parallel.activation_memory_budget is None:
            return True
        run = self.run_with(settings)
        if run is None:
            return False
        try:
            recompute_table(run, axes_of(run, self.cluster.gpus), self.kind)
        except ConfigError:
            return False
        return True

    def placed(self, split: Split, offload: Settings) -> Iterator[Settings]:
        """What decides where the model state lies: ZeRO and its shards, with what leaves the device."""
        for stage in self.values("zero_stage", ZERO if split.dp > 1 else (0,)):
            for shard in self.values("zero_shard_size", self._shards(split, stage)):
                yield {"zero_stage": stage, "zero_shard_size": shard, **offload}

    @property
    def offloads(self) -> list[Settings]:
        """What may leave the device, from the least to the most: what moves more is for a run that does not fit with
        less on any layout. Nothing leaves a CPU for the host's memory, which is its own.
        """
        offloads = OFFLOADS[: 1 if self.kind == "cpu" else None]
        has = self.program.has
        return [each for each in offloads if not {*each} & self.fixed and all(has(*pair) for pair in each.items())]

    def _shards(self, split: Split, stage: int) -> tuple[int | None, ...]:
        """All replicas; or those of one node, where there are others."""
        of_node = self.cluster.nodes_of // split.tp
        inside = 1 < of_node < split.dp and split.dp % of_node == 0
        return (None, of_node) if stage and inside else (None,)

    def _divides(self, settings: Settings) -> bool:
        """Whether settings are legal by themselves, whatever the number of ranks."""
        return not problems_of(self.with_settings(settings), None, own_data=True)

    @property
    def kind(self) -> str:
        return self.cluster.device.kind

    @property
    def rooms(self) -> Rooms:
        """What a rank has room for."""
        device = self.cluster.device
        tensors = allowance_of(self.cluster).room(device.memory)
        return Rooms(tensors, tensors if device.kind == "cpu" else device.host_memory)

    def with_settings(self, settings: Settings) -> Run:
        return applied(self.run, settings)

    def run_with(self, settings: Settings) -> Run | None:
        """The run with these settings; None if it is not legal."""
        run, fields = self.with_settings(settings), frozenset(settings)
        if fields not in self._wrong_elsewhere:
            self._wrong_elsewhere[fields] = len(self._problems(run)) > len(self._problems(run, fields))
        return None if self._wrong_elsewhere[fields] or self._problems(run, fields) else run

    def _problems(self, run: Run, fields: Set[str] | None = None) -> list[str]:
        return problems_of(run, self.cluster.gpus, own_data=True, looked_at=fields)

    @cached_property
    def _wrong_elsewhere(self) -> dict[Set[str], bool]:
        """By fields that are set, whether what reads none of them has problems: that is so for all values of them."""
        return {}


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, min(number, most) + 1) if number % size == 0)
