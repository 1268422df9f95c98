"""Which elements of a reduced gradient a rank counts in the norm."""

from __future__ import annotations

from megazero.zero.parts import Range
from megazero.zero.storage import Bucket


def counted_runs(bucket: Bucket, tp: int, *, counted: bool) -> list[Range]:
    """The ranges [start, stop) of a bucket's own gradients that count in the norm here (or do not). Adjacent ones are
    merged.

    The owner of a range counts it, and of parameters that are replicated over tp its index 0 does. tp: this rank's.
    """
    runs: list[Range] = []
    for fragment in bucket.layout.fragments(*bucket.owned):
        if counted == (fragment.spec.tp_sharded or tp == 0):
            stop = fragment.offset + fragment.numel
            if runs and runs[-1][1] == fragment.offset:
                runs[-1] = runs[-1][0], stop
            else:
                runs.append((fragment.offset, stop))
    return runs
