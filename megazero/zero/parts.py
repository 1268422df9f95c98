"""Where the state of a rank's buckets rests, and the parts in which what is not on the device moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megazero.config.tiers import ALIGNMENT, Tier, TierShare
from megazero.program.instruction import Piece

Range = tuple[int, int]
Key = tuple[int, int]
"""A bucket, and the number of a part of it."""


_NAMES = {
    Piece.STATE: "",
    **dict.fromkeys((Piece.SUMS, Piece.GRADIENTS), ": gradient"),
    **dict.fromkeys((Piece.PARAMETERS, Piece.UPDATED), ": parameters"),
}


def piece_name(piece: Piece, key: Key) -> str:
    """The name in swap files of a part's optimizer state, sum of gradients or parameters."""
    return f"bucket {key[0]}, part {key[1]}{_NAMES[piece]}"


class Part(NamedTuple):
    """Elements [start, stop) of a bucket, and where their optimizer state rests."""

    start: int
    stop: int
    tier: Tier


class Resting(NamedTuple):
    """Where the state of a bucket rests.

    parts  how its optimizer state is cut, and where each part of that rests; none: nothing of the bucket moves in
           parts. All of its optimizer state and gradients are on the device, and its parameters are in memory
    rests  where the parameters rest that the rank stores
    sums   where its gradients are summed, and wait for their update
    """

    parts: tuple[Part, ...] = ()
    rests: Tier = Tier.DEVICE
    sums: Tier = Tier.DEVICE

    @property
    def state_parts(self) -> tuple[Part, ...]:
        """The parts in which its optimizer state rests; none: all of it is on the device, as a whole, and its
        parameters are in memory.
        """
        apart = self.rests.in_files or any(part.tier is not Tier.DEVICE for part in self.parts)
        return self.parts if apart else ()


class Resident(NamedTuple):
    """Elements [start, stop) of a bucket whose optimizer state rests on the device, and is written to disks too so that
    a step is whole there (--nvme-checkpoint). number: among those of its bucket.
    """

    bucket: int
    number: int
    start: int
    stop: int


def resident_piece(one: Resident) -> str:
    """The name in swap files of optimizer state that rests on the device."""
    return f"bucket {one.bucket}, on the device {one.number}"


def residents_of(ranges: Sequence[Range], resting: Sequence[Resting], most: int) -> list[Resident]:
    """All that stays on the device, in pieces of at most `most` elements. ranges, resting: of each bucket."""
    residents = []
    for bucket, ((start, stop), own) in enumerate(zip(ranges, resting, strict=True)):
        stays = [part[:2] for part in own.parts if part.tier is Tier.DEVICE] if own.parts else [(start, stop)]
        cut = (piece for first, last in stays for piece in _pieces(first, last, most))
        residents += [Resident(bucket, number, *piece) for number, piece in enumerate(cut)]
    return residents


def tiers_of(sizes: Sequence[int], offload: TierShare, units: Sequence[frozenset[str]]) -> list[Tier]:
    """Where the parameters of buckets rest, or their gradients. sizes: bytes of each in forward order; 0 of one that
    cannot leave. units: to which each belongs.

    Whole buckets leave: those that belong to named units alone, or the last ones, until at least the share has left.
    The next step needs the others first.
    """
    if offload.units:
        leave = [size > 0 and offload.names(own) for size, own in zip(sizes, units, strict=True)]
        return [offload.tier if leaves else Tier.DEVICE for leaves in leave]
    tiers, total = [Tier.DEVICE] * len(sizes), sum(sizes)
    left = total
    for number in reversed(range(len(sizes))):
        if offload and sizes[number] and left > round((1.0 - offload.share) * total):
            tiers[number], left = offload.tier, left - sizes[number]
    return tiers


def parts_of(
    ranges: Sequence[Range],
    offload: TierShare,
    most: int,
    units: Sequence[frozenset[str]],
    rests: Sequence[Tier],
    sums: Sequence[Tier] = (),
) -> list[tuple[Part, ...]]:
    """The parts of each bucket; none for one that needs none (`Resting`).

    ranges   what the rank updates of each bucket, in forward order
    offload  of the optimizer state
    most     elements of a part that moves
    units    to which each bucket belongs
    rests    where the parameters of each bucket rest
    sums     where its gradients are summed; default: on the device

    With a share, what stays on the device are the first elements: the next step needs them first. The others have more
    time.
    """
    parts: list[tuple[Part, ...]] = []
    cuts, summed = _cuts(ranges, offload, units), sums or [Tier.DEVICE] * len(ranges)
    for (start, stop), cut, tier, gradients in zip(ranges, cuts, rests, summed, strict=True):
        moves = tier.in_files or gradients is not Tier.DEVICE
        longest = most if moves else max(1, cut - start)
        stays = [Part(first, last, Tier.DEVICE) for first, last in _pieces(start, cut, longest)]
        leaves = [Part(first, last, offload.tier) for first, last in _pieces(cut, stop, most)]
        parts.append((*stays, *leaves) if leaves or moves else ())
    return parts


def _cuts(ranges: Sequence[Range], offload: TierShare, units: Sequence[frozenset[str]]) -> Iterator[int]:
    """Of each bucket the first element whose optimizer state leaves the device, or its end if all of it stays. Of a
    share the first elements of the model stay (`parts_of`).
    """
    total = sum(stop - start for start, stop in ranges)
    left = total - round(offload.share * total) if offload else total
    for (start, stop), own in zip(ranges, units, strict=True):
        if offload.units:
            yield start if offload.names(own) else stop
            continue
        cut = min(stop, start + _aligned(left))
        left = max(0, left - (cut - start))
        yield cut


def _pieces(start: int, stop: int, most: int) -> Iterator[Range]:
    """The range in pieces of about one size, each of at most `most` elements."""
    count = -(-(stop - start) // most)
    size = _aligned(-(-(stop - start) // count)) if count else 0
    for first in range(start, stop, size or 1):
        yield first, min(first + size, stop)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
