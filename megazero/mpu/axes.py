"""The arithmetic of the grid, without processes: rank = ((pp_i*DP + dp_i)*CP + cp_i)*TP + tp_i, so that tensor-parallel
ranks are adjacent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from megazero.config.derive import shard_size
from megazero.config.schema import Run
from megazero.mpu.parameter import StateGroup


@dataclass(frozen=True)
class Coordinates:
    """A rank's index on each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes of the grid, and how many ranks share out the state of the same parameters.

    shard_size  number of neighbours among the dp x cp ranks of a stage over which model state is sharded; it divides
                dp x cp. None: all ranks that hold the same parameters, those of a tied embedding's other stage included
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    shard_size: int | None = None

    @property
    def tied_stages(self) -> tuple[int, ...]:
        """The stages that hold the same parameters, in order: of a tied embedding the first and the last."""
        return tuple(sorted({0, self.pp - 1}))

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def is_hybrid(self) -> bool:
        """Whether several ranks of a stage store the same shard: fewer share out its state than hold its layers."""
        return self.shard_size is not None and self.shard_size < self.dp * self.cp

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by name."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    def rank(self, at: Coordinates) -> int:
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def coordinates(self, rank: int) -> Coordinates:
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinates(pp, dp, cp, tp)

    def tensor_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Ranks that hold shards of the same layers."""
        return tuple(self.rank(Coordinates(at.pp, at.dp, at.cp, i)) for i in range(self.tp))

    def pipeline_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Ranks that a micro-batch passes, in order of stages."""
        return tuple(self.rank(Coordinates(i, at.dp, at.cp, at.tp)) for i in range(self.pp))

    def data_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Ranks that split the samples of a batch: dp. They hold the same part of their sequences."""
        return tuple(self.rank(Coordinates(at.pp, i, at.cp, at.tp)) for i in range(self.dp))

    def context_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Ranks that split the tokens of the same samples: cp."""
        return tuple(self.rank(Coordinates(at.pp, at.dp, i, at.tp)) for i in range(self.cp))

    def replica_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Ranks that hold the same layers: dp x cp."""
        return tuple(self.rank(Coordinates(at.pp, d, c, at.tp)) for d, c in product(range(self.dp), range(self.cp)))

    def tied_ranks(self, at: Coordinates) -> tuple[int, ...]:
        """Ranks that hold what stages share, such as a tied embedding, of one tp index: `tied_stages` x replicas."""
        return tuple(rank for stage in self.tied_stages for rank in self.replica_ranks(replace(at, pp=stage)))

    def state_ranks(self, group: StateGroup, at: Coordinates) -> tuple[int, ...]:
        """Ranks that hold the same parameters of this group. `inner_ranks` and `across_ranks` divide them."""
        ranks = {StateGroup.REPLICAS: self.replica_ranks, StateGroup.TIED: self.tied_ranks}
        return ranks[group](at)

    def inner_ranks(self, group: StateGroup, at: Coordinates) -> tuple[int, ...]:
        """The neighbours over which the state of this group's parameters is sharded, in the order of their shards.

        A `shard_size` divides the replicas of a stage, so with one all neighbours are on the same stage. A rank that
        holds no such parameters gets the answer of its counterpart on the first of `tied_stages`.
        """
        ranks = self.state_ranks(group, at)
        size = self.shard_size or len(ranks)
        first = self._place(ranks, at) // size * size
        return ranks[first : first + size]

    def across_ranks(self, group: StateGroup, at: Coordinates) -> tuple[int, ...]:
        """The ranks that store the same shard: one of each set of neighbours, for a tied embedding those of both
        stages.
        """
        ranks = self.state_ranks(group, at)
        size = self.shard_size or len(ranks)
        return ranks[self._place(ranks, at) % size :: size]

    def _place(self, ranks: tuple[int, ...], at: Coordinates) -> int:
        own = self.rank(at)
        return ranks.index(own if own in ranks else self.rank(replace(at, pp=self.tied_stages[0])))


@dataclass(frozen=True)
class SharingAxes(Axes):
    """Axes of a grid whose stages share other parameters than a tied embedding. sharing: these stages, in order."""

    sharing: tuple[int, ...] = ()

    @property
    def tied_stages(self) -> tuple[int, ...]:
        return self.sharing


def axes_of(run: Run, world_size: int) -> Axes:
    """The grid's sizes: dp = world_size / (tp * pp), cp = 1."""
    dp = world_size // (run.parallel.tp * run.parallel.pp)
    return Axes(run.parallel.pp, dp, 1, run.parallel.tp, shard_size(run, dp))
