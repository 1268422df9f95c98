"""The memory in which ranks exchange tensors, as far as one touches it: counted, beside the pages of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.mpu.axes import Axes
from megazero.mpu.collectives import all_gather, all_reduce, reduce_scatter
from megazero.mpu.grid import build_grid
from megazero.mpu.shared_memory import SLOT, SLOTS
from megazero.plan.cluster.shared_pages import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SharedMessage, covered
from tests.ranks import run_ranks

AROUND = 1 << 16
"""The system maps pages around one that is read, where they are there."""


def resident() -> dict[str, int]:
    """Bytes of this process's pages of shared memory, by the number of its file."""
    pages, inode = dict[str, int](), None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            inode = words[4] if "memfd:megazero" in line else None
        elif inode is not None and words[0] == "Rss:":
            pages[inode] = pages.get(inode, 0) + 1024 * int(words[1])
    return pages


def touched_by(_rank: int, size: int, kind: str, nbytes: int) -> int:
    """The pages of a rank after as many of these collectives as there are slots. What groups of other tests have left
    in its process does not count.
    """
    before, group = resident(), build_grid(Axes(dp=size)).world
    whole, piece = torch.ones(nbytes // 4), torch.ones(nbytes // 4 // size)
    for _ in range(SLOTS):
        if kind == ALL_REDUCE:
            all_reduce(whole, group).wait()
        elif kind == ALL_GATHER:
            all_gather(whole, piece, group).wait()
        else:
            reduce_scatter(piece, whole, group).wait()
    return sum(size for inode, size in resident().items() if inode not in before)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="pages are counted on Linux")
@pytest.mark.parametrize(
    ("size", "kind", "nbytes"),
    [(2, ALL_REDUCE, SLOT // 2), (4, ALL_REDUCE, SLOT), (4, REDUCE_SCATTER, SLOT), (2, ALL_GATHER, SLOT)],
)
def test_touched_bytes_are_those_of_real_pages(size: int, kind: str, nbytes: int) -> None:
    touched = run_ranks(size, touched_by, size, kind, nbytes)[0]
    sent = SharedMessage(kind, tuple(range(size)), nbytes)
    parts = [list(sent.touched(member)) for member in range(size)]
    counted = SLOTS * sum(map(covered, parts))
    assert (
        counted <= touched <= counted + SLOTS * 2 * AROUND * sum(map(len, parts)) < size * SLOTS * (SLOT + 4 * AROUND)
    )


def test_ranges_that_overlap_count_once() -> None:
    assert covered([(4, 6), (0, 3), (2, 5), (8, 9)]) == 7 and covered([]) == 0


def test_larger_messages_go_in_chunks() -> None:
    assert [*SharedMessage(ALL_REDUCE, (0, 1), 5 * SLOT).touched(1)] == [(0, SLOT)]
    assert [*SharedMessage(ALL_GATHER, (0, 1), 5 * SLOT).touched(1)] == [(0, SLOT)]
    assert [*SharedMessage(REDUCE_SCATTER, (0, 1), 5 * SLOT).touched(1)] == [(0, SLOT // 2)]
