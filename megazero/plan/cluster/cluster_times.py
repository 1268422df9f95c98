"""The seconds of a step's computations and messages on a cluster: units and messages as a simulation takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from megazero.config.derive import leaving, padded_vocab, updates_early
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.graphs import replayed
from megazero.pipeline.measured import read_by_a_unit
from megazero.pipeline.stage_specs import stage_specs
from megazero.plan.cluster.hardware import Cluster
from megazero.plan.cluster.kernels import Constants, Kernels, constants_of
from megazero.plan.cluster.messages import Messages, place_of
from megazero.plan.cluster.programs import OURS, Program
from megazero.plan.cluster.unit_times import ChunkSeconds, unit_timer
from megazero.plan.rank_state import micro_batches_of
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.program.instruction import READ_LANES, WRITE_LANES, Lane
from megazero.program.times import ChunkTimes

GRADIENT = 4
"""Bytes of a gradient of which `ChunkTimes.update` counts: it is fp32 where parameters have 16 bits."""


class LaneTimes(NamedTuple):
    """Seconds for each byte on each lane, and those of each message beside its bytes."""

    per_byte: dict[Lane, float]
    latency: float


@dataclass(frozen=True)
class ClusterRates:
    """What turns a run into seconds on a cluster, as `plan.placed_step.TimeModel`. program: whose run it is."""

    cluster: Cluster
    program: Program = OURS

    @property
    def has_disks(self) -> bool:
        return self.cluster.device.read is not None and self.cluster.device.write is not None

    @cached_property
    def _constants(self) -> Constants:
        return constants_of(self.cluster.device)

    @cached_property
    def _messages(self) -> Messages:
        return Messages(self.cluster, self._constants)

    @property
    def update(self) -> float:
        """Seconds of an update on the device for each byte of gradients."""
        return Kernels(self.cluster.device, self._constants).moved(self._constants.update) / GRADIENT

    def times(self, run: Run, axes: Axes, kind: str) -> ChunkTimes:
        """The times of a rank's step in seconds. kind: of device, cpu or cuda."""
        plan = activation_plan(run, kind)
        timer, table = unit_timer(self._while(run, axes), read_by_a_unit(run), plan), recompute_table(run, axes, kind)
        chunks = [timer.chunk(spec, table) for spec in stage_specs(run)]
        chunks[-1] = self._with_loss(chunks[-1], run)
        lanes = self.lanes(axes, is_sharded=run.parallel.zero_stage > 0)
        message = self.message(run, axes, plan.hidden_bytes)
        # a pass of a chunk in the middle has a message in front and one behind
        blocked = [self.blocked(message) * ((number > 0) + (number < len(chunks) - 1)) for number in range(len(chunks))]
        device = self.cluster.device
        return ChunkTimes(
            tuple(chunk.forward + lost for chunk, lost in zip(chunks, blocked, strict=True)),
            tuple(chunk.backward + lost for chunk, lost in zip(chunks, blocked, strict=True)),
            message - self.blocked(message),
            units=tuple(chunk.units for chunk in chunks),
            per_byte=lanes.per_byte,
            latency=lanes.latency,
            update=self.update,
            beside=1.0 if device.beside is None else device.beside,
            carrying=1 / device.carried if device.carried else 0.0,
            # a CPU carries its messages itself
            waits=not run.parallel.overlap or kind == "cpu",
            at_once=self.stages_at_once(axes) if kind == "cpu" else None,
        )

    def _with_loss(self, chunk: ChunkSeconds, run: Run) -> ChunkSeconds:
        """The chunk of the head, with what the loss of the program takes more than ours."""
        if not any(self.program.logits):
            return chunk
        forward, backward = self.loss(run)
        units = (*chunk.units[:-1], chunk.units[-1] + forward + backward)
        return ChunkSeconds(chunk.forward + forward, chunk.backward + backward, units)

    def loss(self, run: Run) -> tuple[float, float]:
        """Seconds of a forward and of a backward that the loss of the program takes more than ours."""
        tokens = run.schedule.micro_batch_size * run.model.seq_length
        logits = tokens * padded_vocab(run.model, run.parallel.tp) // run.parallel.tp
        kernels = Kernels(self.cluster.device, self._constants)
        forward, backward = (kernels.moved(logits * nbytes) for nbytes in self.program.logits)
        return forward, backward

    def _while(self, run: Run, axes: Axes) -> Cluster:
        """The cluster as it computes: a CPU's kernels take longer where other threads update or copy model state, the
        host launches none of a micro-batch that is replayed, and another program launches as fast as it does.
        """
        device, launch = self.cluster.device, self.program.launch or self._constants.launch
        if device.kind == "cpu" and any(leaving(run).values()):
            launch += self._constants.waking
        if run.parallel.cuda_graphs:
            launch *= self._launched(run, axes)
        if launch == self._constants.launch:
            return self.cluster
        constants = MappingProxyType({**device.constants, "launch": launch})
        return replace(self.cluster, device=replace(device, constants=constants))

    def _launched(self, run: Run, axes: Axes) -> float:
        """The share of a step's micro-batches that are not replayed."""
        micro_batches = max(1, micro_batches_of(run, axes))
        travels = axes.dp * axes.cp > 1 or updates_early(run.parallel, run.offload)
        return 1 - len(replayed(micro_batches, travels)) / micro_batches

    def stages_at_once(self, axes: Axes) -> int | None:
        """How many stages a CPU computes at full speed, where their ranks are more than its cores; None: all."""
        ranks, cores = min(self.cluster.gpus, self.cluster.nodes_of), self.cluster.device.processors
        if ranks <= cores or axes.pp == 1:
            return None
        return max(1, int(cores * axes.pp // ranks))

    def message(self, run: Run, axes: Axes, nbytes: int) -> float:
        """Seconds of hidden states on their way to the next stage, in the mean of both passes. With sequence
        parallelism each rank has a part of its own anyway.
        """
        if axes.pp == 1:
            return 0.0
        whole, parts = self._sent(axes, nbytes, 1), 1 if run.parallel.sequence_parallel else axes.tp
        return fmean(self._sent(axes, nbytes, parts) if scattered else whole for scattered in self.program.scatters)

    def _sent(self, axes: Axes, nbytes: int, parts: int) -> float:
        """The same where each tp rank sends one of so many parts, which are gathered behind the way."""
        gathered = self._messages.collective(place_of(parts, 1, self.cluster.nodes_of), nbytes)
        return self._messages.between_stages(axes.tp * axes.cp * axes.dp, nbytes // parts) + gathered

    def blocked(self, message: float) -> float:
        """Seconds of a message between stages in which neither of the two computes."""
        return message * (1.0 if self.program.waits else self._constants.blocking)

    def lanes(self, axes: Axes, *, is_sharded: bool = False) -> LaneTimes:
        """Those of messages on model state, of copies and updates, and of disks. is_sharded: whether gradients are
        reduced into shards, which are gathered, and not reduced as a whole.
        """
        nodes_of, replicas = self.cluster.nodes_of, axes.dp * axes.cp
        shards = min(axes.shard_size or replicas, replicas)  # a search asks for the layers of one replica, too
        near = place_of(shards, axes.tp, nodes_of)
        far = place_of(replicas // shards, axes.tp * shards, nodes_of)
        if far.ranks == 1 and axes.pp > 1:  # parameters of two stages: what is tied is on the first and on the last
            far = place_of(2, axes.tp * replicas * (axes.pp - 1), nodes_of)
        device, messages = self.cluster.device, self._messages
        host = 1 / device.host
        per_byte = {
            Lane.HOST: 1 / device.update_host if device.update_host else 0.0,
            **dict.fromkeys(READ_LANES, 1 / device.read if device.read else 0.0),
            **dict.fromkeys(WRITE_LANES, 1 / device.write if device.write else 0.0),
            Lane.SHARDS: messages.per_byte(near),
            Lane.ACROSS: messages.per_byte(far),
            Lane.TENSOR: messages.per_byte(place_of(axes.tp, 1, nodes_of)),
            Lane.TO_HOST: host,
            Lane.TO_DEVICE: host,
        }
        return LaneTimes(per_byte, messages.ring_latency(near) if is_sharded else messages.latency(near))
