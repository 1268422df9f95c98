"""The seconds of messages on a cluster, by their bytes, their group's places on nodes, and what shares their links.

Ranks that are neighbours on the tensor-parallel axis are neighbours on a node (`Axes`). A group is `ranks` ranks that
are `stride` apart. A ring sends (N - 1)/N of a reduce-scatter's input, an all-gather's output or of twice an
all-reduce's tensor through each rank (Thakur et al. 2005, "Optimization of collective communication operations in
MPICH"), and so through each of the node's borders that the ring crosses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.plan.cluster.hardware import Cluster
from megazero.plan.cluster.kernels import Constants

HOPS: Mapping[str, tuple[float, float]] = MappingProxyType({"cuda": (3.4e-6, 14e-6), "cpu": (0.0, 0.0)})
"""Seconds of a step of a ring beside its bytes, to a rank of the node and to another node, by kind of device: those by
which NCCL chooses among its algorithms for large messages (src/graph/tuning.cc, its protocol Simple over NVLink and
over a network). A CPU's are in its measured latency.
"""


@dataclass(frozen=True)
class GroupPlace:
    """Where the ranks of a group are.

    ranks    number of them
    on_node  how many of them are on one node
    sharing  groups of the same kind that send through the border of a node at once
    dense    whether those on a node are neighbours
    reach    devices from the first of them on a node to the last
    """

    ranks: int
    on_node: int
    sharing: int
    dense: bool
    reach: int

    @property
    def inside(self) -> bool:
        """Whether all are on one node."""
        return self.on_node == self.ranks


def place_of(ranks: int, stride: int, nodes_of: int) -> GroupPlace:
    """The place of a group of ranks that are `stride` apart, on nodes of so many devices."""
    on_node = min(ranks, max(1, nodes_of // stride))
    return GroupPlace(ranks, on_node, max(1, nodes_of // on_node), stride == 1, (on_node - 1) * stride + 1)


@dataclass(frozen=True)
class Messages:
    """Messages of a cluster."""

    cluster: Cluster
    constants: Constants

    def rate(self, place: GroupPlace) -> float:
        """Bytes in a second that a ring of the group sends through each rank, while its like do the same."""
        device = self.cluster.device
        inside = device.inside * self.constants.inside
        if device.crosses_boards(place.reach):
            inside = min(inside, device.across / place.sharing)
        if place.inside:
            return inside
        border = self.cluster.node_rate * self.constants.between / place.sharing
        if place.on_node > 1 and not place.dense:
            border *= self.constants.strided
        return min(inside, border)

    def per_byte(self, place: GroupPlace) -> float:
        """Seconds for each byte of a collective, by the convention of `program.traffic.message_bytes`."""
        return (place.ranks - 1) / place.ranks / self.rate(place)

    def latency(self, place: GroupPlace) -> float:
        """Seconds of a collective beside its bytes: a tree of all ranks, and one of nodes."""
        nodes = math.ceil(place.ranks / place.on_node)
        return self.constants.latency * math.log2(place.ranks) + self.cluster.link.latency * math.log2(nodes)

    def ring_latency(self, place: GroupPlace) -> float:
        """The same of a reduce-scatter or an all-gather, for which NCCL has rings alone (but PAT, where each node has
        one rank of the group): a part passes all ranks one after the other.
        """
        near, far = HOPS[self.cluster.device.kind]
        nodes = math.ceil(place.ranks / place.on_node)
        return self.latency(place) + near * (place.ranks - nodes) + far * (nodes - 1)

    def collective(self, place: GroupPlace, nbytes: float) -> float:
        """Seconds of one collective."""
        return self.latency(place) + nbytes * self.per_byte(place) if place.ranks > 1 else 0.0

    def between_stages(self, stride: int, nbytes: float) -> float:
        """Seconds of a message to the next stage, whose ranks are `stride` further, while all ranks of a node send.

        Where some stages have their next one on the same node and others do not, this is that of the slower ones.
        """
        if self.cluster.gpus <= self.cluster.nodes_of:
            device, reached = self.cluster.device, self.constants.stages or self.constants.inside
            seconds = nbytes / (device.inside * reached)
            if device.crosses_boards(stride + 1):
                seconds = max(seconds, nbytes * min(stride, device.board) / device.across)
            return self.constants.latency + seconds
        crossing = min(stride, self.cluster.nodes_of)
        latency = self.constants.latency + self.cluster.link.latency  # of two ranks on two nodes
        return latency + nbytes * crossing / (self.cluster.node_rate * self.constants.between)
