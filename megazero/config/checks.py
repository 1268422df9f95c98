"""What a check of a run is and reads, and helpers that name the nearest valid values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megazero.config.derive import pipeline_schedule
from megazero.config.schema import Run


@dataclass(frozen=True)
class CheckContext:
    """The input of a check of a run.

    world_size  number of ranks; None if it is not known
    given       fields that the command line itself sets
    own_data    whether a program passes the training data, so that the run does not name any
    decided     fields whose values are not the user's, but follow from facts
    whole_batches  whether each step is to have the whole global batch, so that a ramp to it does not matter
    """

    run: Run
    world_size: int | None
    given: frozenset[str]
    own_data: bool = False
    decided: frozenset[str] = frozenset()
    whole_batches: bool = False

    @property
    def ramp(self) -> tuple[int, ...] | None:
        """START, INCREMENT and SAMPLES of the ramp that leads to the global batch; None for one of other numbers."""
        ramp = self.run.schedule.rampup_batch_size
        return ramp if ramp is not None and len(ramp) == 3 and not self.whole_batches else None

    @property
    def dp(self) -> int | None:
        """Number of data-parallel ranks; None if the world size is not known or tp x pp does not divide it."""
        ranks = self.run.parallel.tp * self.run.parallel.pp
        return None if self.world_size is None or self.world_size % ranks else self.world_size // ranks

    @property
    def several(self) -> bool:
        """Whether there may be several ranks."""
        return self.world_size != 1

    @property
    def shards(self) -> bool:
        """Whether some model state has several replicas: over dp, or a tied embedding on two stages."""
        # zb-v folds the pipeline: its first and last chunk, embedding and head, are on one stage
        two_stages = self.run.parallel.pp > 1 and pipeline_schedule(self.run.parallel) != "zb-v"
        return self.dp != 1 or (two_stages and not self.run.model.untie_embeddings_and_output_weights)

    @property
    def reduces(self) -> bool:
        """Whether gradients of several ranks are added up."""
        return self.shards or (self.run.parallel.sequence_parallel and self.run.parallel.tp > 1)

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several micro-batches."""
        return self.dp is None or self.run.schedule.global_batch_size > self.run.schedule.micro_batch_size * self.dp


Problems = Iterator[str]


@dataclass(frozen=True)
class Check:
    """A relation between the fields that it reads. `find` yields a sentence for each problem."""

    find: Callable[[CheckContext], Problems]
    reads: frozenset[str]


def reads(fields: str) -> Callable[[Callable[[CheckContext], Problems]], Check]:
    """Makes a check of a function that reads these fields, whose names have blanks between."""
    return lambda find: Check(find, frozenset(fields.split()))


def divisors(number: int) -> list[int]:
    """All divisors, the smallest first."""
    # up to the root: a hidden size of millions has its divisors at once
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(value: int, valid: Iterable[int]) -> str:
    """The valid values next below and above `value`, as words."""
    valid = sorted(set(valid))
    below, above = [v for v in valid if v < value][-1:], [v for v in valid if v > value][:1]
    return " or ".join(str(v) for v in below + above)


def nearest_multiples(value: int, of: int) -> str:
    """The multiples of a number, 0 aside, next below and above `value`, as words."""
    return nearest(value, [m for m in (value // of * of, (value // of + 1) * of) if m >= of])
