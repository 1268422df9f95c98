"""Where a column of the model state rests between its uses: on the device, in host memory, or on disks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """A place for model state. The values are the words of --offload-optimizer and its like."""

    DEVICE = "none"
    HOST = "cpu"
    DISK = "nvme"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Offload:
    """What of a column leaves the device: the share of its bytes that rests in `tier`. The rest stays on the device."""

    tier: Tier = Tier.DEVICE
    share: float = 1.0

    def __bool__(self) -> bool:
        return self.tier is not Tier.DEVICE

    def __str__(self) -> str:
        return self.tier.value if self.share == 1.0 else f"{self.tier.value}:{self.share:g}"


SLOTS = 4
"""Parts of buckets on their way at a time: one is read, one updated, one written, and one waits."""
ALIGNMENT = 1024
"""A part begins a multiple of this many elements behind the begin of what the rank updates."""


def offload_of(text: str) -> Offload:
    """The value of a flag: none, cpu, nvme, cpu:0.6 or nvme:0.6. Raises ValueError with what is wrong with it."""
    word, colon, share = text.partition(":")
    tier = next((tier for tier in Tier if tier.value == word), None)
    if tier is None:
        raise ValueError(f"{word!r} is not one of {', '.join(tier.value for tier in Tier)}")
    if not colon:
        return Offload(tier)
    try:
        number = float(share)
    except ValueError:
        raise ValueError(f"the share {share!r} is not a number") from None
    if tier is Tier.DEVICE:
        raise ValueError("none has no share")
    if not 0.0 < number <= 1.0:
        raise ValueError(f"the share {share} is not above 0 and at most 1")
    return Offload(tier, number)
