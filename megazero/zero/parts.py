"""The parts in which a rank updates its buckets, where some of the optimizer state is not on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megazero.config.tiers import ALIGNMENT, Offload, Tier


class Part(NamedTuple):
    """Elements [start, stop) of a bucket, and where their optimizer state rests."""

    start: int
    stop: int
    tier: Tier


def parts_of(ranges: Sequence[tuple[int, int]], offload: Offload, most: int) -> list[tuple[Part, ...]]:
    """The parts of each bucket; none for one whose state is all on the device.

    ranges  what the rank updates of each bucket, in forward order
    most    elements of a part that is not on the device

    What stays on the device are the first elements: the next step needs them first. The others have more time.
    """
    if not offload:
        return [()] * len(ranges)
    total = sum(stop - start for start, stop in ranges)
    left = total - round(offload.share * total)
    found: list[tuple[Part, ...]] = []
    for start, stop in ranges:
        cut = min(stop, start + _aligned(left))
        left = max(0, left - (cut - start))
        stays = [Part(start, cut, Tier.DEVICE)] if cut > start else []
        leaves = [Part(first, last, offload.tier) for first, last in _pieces(cut, stop, most)]
        found.append((*stays, *leaves) if leaves else ())
    return found


def _pieces(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """The range in pieces of about one size, each of at most `most` elements."""
    count = -(-(stop - start) // most)
    size = _aligned(-(-(stop - start) // count)) if count else 0
    for first in range(start, stop, size or 1):
        yield first, min(first + size, stop)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
