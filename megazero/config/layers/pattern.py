"""What a user writes for layers that differ: the pattern of the layers, --layer-pattern "window:1024 local x5, full",
and further sets of rotary settings that the pattern names, --rotary-sets "local base=10000".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

from megazero.config.rotary import RotaryScaling, RotarySettings, printed

FULL_REACH, NO_POSITIONS = "full", "none"


@dataclass(frozen=True)
class PatternItem:
    """What a pattern says of a layer; what it leaves open is that of the whole model.

    window     W: a query sees the last W keys, its own among them. None: it sees all before it
    chunk      C: a query sees the keys of its own chunk of C positions. None: chunks do not matter
    positions  none, alibi, rotary, or the name of a further set of rotary settings; None: --position-embedding
    width      of the feed-forward layer; None: --ffn-hidden-size

    Raises ValueError for a window and a chunk at once, and for a size that is not above 0.
    """

    window: int | None = None
    chunk: int | None = None
    positions: str | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        for name, size in {"window": self.window, "chunk": self.chunk, "width": self.width}.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} {size} is not a whole number above 0")
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"window {self.window} and chunk {self.chunk}: a layer has one of them")

    def __str__(self) -> str:
        sizes = {"window": self.window, "chunk": self.chunk}
        reach = next((f"{word}:{size}" for word, size in sizes.items() if size is not None), FULL_REACH)
        width = None if self.width is None else f"ffn:{self.width}"
        return " ".join(word for word in (reach, self.positions, width) if word is not None)


@dataclass(frozen=True)
class LayerPattern:
    """Items of layers that follow each other. A model with more layers begins again with the first item.

    Raises ValueError for a pattern without items.
    """

    items: tuple[PatternItem, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("a pattern of layers has one item or more")

    @classmethod
    def parsed(cls, text: str) -> LayerPattern:
        """The pattern of a text: items between commas, each a few words between blanks.

        full, window:W or chunk:C say which keys a query sees; none, alibi, rotary or the name of a set of rotary
        settings say the positions; ffn:F is the width of the feed-forward layer; xN repeats the item N times. Raises
        ValueError.
        """
        items: list[PatternItem] = []
        for part in text.split(","):
            words = part.split()
            if not words:
                raise ValueError(f"{text!r} has an empty item between its commas")
            repeats = 1
            if (times := re.fullmatch(REPEATS, words[-1])) is not None:
                # int() refuses thousands of digits with a sentence of its own
                repeats, words = int(times[1][: MOST_DIGITS + 1]), words[:-1]
            if not words or not 1 <= repeats <= MOST_LAYERS:
                raise ValueError(f"{part.strip()!r} repeats no item, or not 1 to {MOST_LAYERS} times")
            items += [_item(words, part.strip())] * repeats
        return cls(tuple(items))

    @classmethod
    def shortest(cls, layers: tuple[PatternItem, ...]) -> LayerPattern | None:
        """The shortest pattern whose repetition gives these layers; None where all are what the model is."""
        number = len(layers)
        for length in range(1, number + 1):
            if all(layers[i] == layers[i % length] for i in range(number)):
                return None if layers[:length] == (PatternItem(),) else cls(layers[:length])
        return None

    def layers(self, number: int) -> tuple[PatternItem, ...]:
        """The items of a model of so many layers."""
        return tuple(islice(cycle(self.items), number))

    def __str__(self) -> str:
        runs: list[tuple[PatternItem, int]] = []
        for item in self.items:
            if runs and runs[-1][0] == item:
                runs[-1] = item, runs[-1][1] + 1
            else:
                runs.append((item, 1))
        return ", ".join(f"{item}{f' x{count}' * (count > 1)}" for item, count in runs)


REPEATS = r"x([0-9]+)"
MOST_DIGITS = 18
"""Of a number in a pattern: larger ones would not fit into 64 bits."""
MOST_LAYERS = 10_000
"""The most layers of one item: a mistaken number of digits is an error, and no list without end."""


def _item(words: list[str], text: str) -> PatternItem:
    item, parts = PatternItem(), set[str]()
    for word in words:
        name, colon, size = word.partition(":")
        part = "positions" if not colon and word != FULL_REACH else _PARTS.get(name)
        if re.fullmatch(REPEATS, word):
            raise ValueError(f"{word!r} in {text!r} repeats an item, and stands at its end, once")
        if part is None or (colon and name == FULL_REACH):
            raise ValueError(f"{word!r} in {text!r} is none of {', '.join(_FORMS)}")
        if part in parts:
            raise ValueError(f"{word!r} in {text!r}: an item says once {part}")
        parts.add(part)
        item = replace(item, positions=word) if part == "positions" else _SIZED[name](item, _size(word, size, text))
    return item


def _size(word: str, size: str, text: str) -> int | None:
    if word == FULL_REACH:
        return None
    if not re.fullmatch(f"[0-9]{{1,{MOST_DIGITS}}}", size) or int(size) == 0:
        raise ValueError(
            f"{word!r} in {text!r}: {size!r} is not a whole number above 0 of at most {MOST_DIGITS} digits"
        )
    return int(size)


_SIZED: Mapping[str, Callable[[PatternItem, int | None], PatternItem]] = MappingProxyType(
    {
        FULL_REACH: lambda item, size: item,
        "window": lambda item, size: replace(item, window=size),
        "chunk": lambda item, size: replace(item, chunk=size),
        "ffn": lambda item, size: replace(item, width=size),
    }
)
"""Word of an item before its colon -> the item with the word's number."""

_REACH = "which keys a query sees"
_PARTS = MappingProxyType({FULL_REACH: _REACH, "window": _REACH, "chunk": _REACH, "ffn": "the width of its ffn"})
"""The same word -> what it says of a layer."""
_FORMS = ("full", "window:W", "chunk:C", "ffn:F", "xN at the end", "the name of positions")


@dataclass(frozen=True)
class RotarySet:
    """Rotary settings with a name, which a pattern gives to layers."""

    name: str
    settings: RotarySettings

    @classmethod
    def parsed(cls, text: str) -> RotarySet:
        """The set of a text: its name, then base=B, share=S and interleaved=true or false, as far as they are not the
        defaults, and at last scaling=KIND with the numbers of this kind (`config.rotary.RotaryScaling`).

        Raises ValueError.
        """
        head, scaling, rest = text.partition(" scaling=")
        name, *words = head.split() or [""]
        if not name.isidentifier() or name in RESERVED or re.fullmatch(REPEATS, name):
            raise ValueError(
                f"{text!r} begins with {name!r}: a set needs a name, which is none of {', '.join(RESERVED)}, and no xN"
            )
        settings = RotarySettings(scaling=RotaryScaling.parsed(rest) if scaling else None)
        keys = [word.partition("=")[0] for word in words]
        for word in words:
            key, _, value = word.partition("=")
            if keys.count(key) > 1:
                raise ValueError(f"{text!r} gives {key} {keys.count(key)} times")
            if key not in _READ:
                raise ValueError(
                    f"{word!r} in {text!r} is none of {', '.join(f'{key}=' for key in (*_READ, 'scaling'))}"
                )
            try:
                changed: dict[str, Any] = {key: _READ[key](value)}
            except (KeyError, ValueError):
                raise ValueError(f"{word!r} in {text!r}: {value!r} is no value of {key}") from None
            settings = replace(settings, **changed)
        return cls(name, settings)

    def __str__(self) -> str:
        default, settings = RotarySettings(), self.settings
        words = [self.name]
        words += [f"base={printed(settings.base)}"] if settings.base != default.base else []
        words += [f"share={settings.share!r}"] if settings.share != default.share else []
        words += ["interleaved=true"] if settings.interleaved else []
        words += [f"scaling={settings.scaling}"] if settings.scaling is not None else []
        return " ".join(words)


RESERVED = (FULL_REACH, NO_POSITIONS, "alibi", "rotary", "learned", "window", "chunk", "ffn")
"""Words that a pattern has for other things than a set of rotary settings."""
_READ: Mapping[str, Callable[[str], float | bool]] = MappingProxyType(
    {"base": float, "share": float, "interleaved": {"true": True, "false": False}.__getitem__}
)
