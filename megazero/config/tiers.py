"""Where a column of the model state rests between its uses: on the device, in host memory, or in files. A placement may
name the units of the model (the embedding, a block, the head) that leave the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from megazero.system.reading import shown


class Tier(Enum):
    """A place for model state. The values are the words of --offload-optimizer and its like."""

    DEVICE = "none"
    HOST = "cpu"
    DISK = "nvme"
    FILES = "files"

    __hash__ = object.__hash__

    @property
    def in_files(self) -> bool:
        """Whether what rests here is in files: it passes through host memory on its way to the device and back."""
        return self in FILE_TIERS

    @property
    def goes_back(self) -> bool:
        """Whether what is written here leaves the version before it, which can be taken up again."""
        return self.in_files and FILE_TIERS[self].goes_back

    @property
    def depth(self) -> int:
        """The number of copies that bring something from here to the device."""
        return 2 if self.in_files else int(self is Tier.HOST)


@dataclass(frozen=True)
class FileTier:
    """What is asked of a tier in files.

    folders     the field of a run that names its folders
    name        of the tier in words
    place       where something rests, in words
    files       its files in words
    asks        what its folders are for, to a user who has named none
    more        what a user may give who has named too little room
    preallocated
                whether they have all their bytes from the start, are locked, and are read and written past the page
                cache, through buffers of their own (`disk.swap_file`)
    goes_back   whether what was written before the newest version of something can be taken up again
    """

    folders: str
    name: str
    place: str
    files: str
    asks: str
    more: str
    preallocated: bool
    goes_back: bool


FILE_TIERS: Mapping[Tier, FileTier] = MappingProxyType(
    {
        Tier.DISK: FileTier(
            "nvme_path",
            "disks",
            "on disks",
            "swap files",
            "a folder for swap files on each disk that it may use",
            "a folder more, on another disk",
            preallocated=True,
            goes_back=True,
        ),
        Tier.FILES: FileTier(
            "files_path",
            "files",
            "in files",
            "plain files",
            "a folder that another host may own",
            "a folder with more room",
            preallocated=False,
            goes_back=False,
        ),
    }
)


@dataclass(frozen=True)
class TierShare:
    """What of a column leaves the device: the share of its bytes that rests in `tier`, or what of it belongs to some
    units of the model (`config.tiers`; none: the share decides). The rest stays on the device.
    """

    tier: Tier = Tier.DEVICE
    share: float = 1.0
    units: tuple[str, ...] = ()

    @classmethod
    def parsed(cls, text: str) -> TierShare:
        """The value of a flag: none, cpu, nvme, cpu:0.6, or nvme:embedding,blocks 0-5. Raises ValueError."""
        word, colon, share = text.partition(":")
        tier = next((tier for tier in Tier if tier.value == word), None)
        if tier is None:
            raise ValueError(f"{word!r} is not one of {', '.join(tier.value for tier in Tier)}")
        if not colon:
            return cls(tier)
        if tier is Tier.DEVICE:
            raise ValueError(f"none has no share, as in {text!r}")
        try:
            number = float(share)
        except ValueError:
            return cls(tier, units=_units(share, text))  # `unknown_units` says whether the model has them
        if not 0.0 < number <= 1.0:
            raise ValueError(f"the share {share} is not above 0 and at most 1")
        return cls(tier, number)

    @classmethod
    def of_table(cls, tier: object, share: object) -> TierShare:
        """What a file says in two keys. share: None for all of the column. Raises ValueError."""
        if isinstance(share, bool) or not isinstance(share, int | float | None):
            # a word would name a unit, by `parsed`
            raise ValueError(f"the share {shown(share)} is not a number")
        return cls.parsed(f"{tier}" if share is None else f"{tier}:{share}")

    def __bool__(self) -> bool:
        return self.tier is not Tier.DEVICE

    @property
    def in_files(self) -> bool:
        return self.tier.in_files

    def names(self, units: Iterable[str]) -> bool:
        """Whether all of these units are among its own."""
        return all(any(_has_unit(word, unit) for word in self.units) for unit in units)

    def __str__(self) -> str:
        if self.units:
            return f"{self.tier.value}:{','.join(self.units)}"
        return self.tier.value if self.share == 1.0 else f"{self.tier.value}:{self.share:g}"


SLOTS = 6
"""Parts of buckets on their way at a time, at the least: two are read and two written, as each lane of a disk does, one
is updated, and one waits. Parts are cut so that --nvme-buffer-bytes holds so many of them.
"""
MOST_SLOTS = 16
"""Parts of buckets on their way at a time, at the most, where the buffer holds more. What is read ahead of the norm and
what is written behind the last update has slots, so that the disk works beside the backward too.
"""
ALIGNMENT = 1024
"""A part begins a multiple of this many elements behind the begin of what the rank updates."""


def _units(names: str, text: str) -> tuple[str, ...]:
    """The names of units between commas. text: the whole value. Raises ValueError for an empty name."""
    units = names.split(",")
    if not all(map(str.strip, units)):
        raise ValueError(
            f"there is neither a share nor a unit behind the colon of {text!r}"
            if len(units) == 1
            else f"there is no unit between two commas of {text!r}"
        )
    return tuple(map(plain_unit, units))


EMBEDDING, HEAD = "embedding", "head"
_WORD = re.compile(r"blocks? (?P<first>[0-9]{1,9})(-(?P<last>[0-9]{1,9}))?")


def block_unit(number: int | str) -> str:
    """The name of a block."""
    return f"block {number}"


def plain_unit(word: str) -> str:
    """The words of a unit without what is said around them: "the embedding" is "embedding"."""
    return " ".join(word.split()).removeprefix("the ")


def _has_unit(word: str, unit: str) -> bool:
    """Whether a unit is among those that a word such as "embedding", "block 3" or "blocks 0-5" stands for."""
    number = unit.removeprefix("block ")
    return word == unit or (number.isdecimal() and int(number) in _blocks(word))


def unknown_units(words: Iterable[str], layers: int) -> list[str]:
    """Those of the words that stand for a unit which a model with so many layers does not have."""
    return [word for word in words if word not in (EMBEDDING, HEAD) and not 0 < _blocks(word).stop <= layers]


def all_units(layers: int) -> str:
    """The units of a model with so many layers, in words."""
    return f"{EMBEDDING}, blocks 0-{layers - 1}, {HEAD}" if layers > 1 else f"{EMBEDDING}, {block_unit(0)}, {HEAD}"


def _blocks(word: str) -> range:
    """The blocks that a word stands for; none: it is another unit, or no name of one."""
    match = _WORD.fullmatch(word)
    if match is None:
        return range(0)
    first, last = int(match["first"]), int(match["last"] or match["first"])
    return range(first, last + 1) if first <= last else range(0)
