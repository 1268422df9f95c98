"""Regular expressions of module names, as adapter_config.json has them, matched without going back.

A stranger wrote them, and Python's `re` takes exponential time for some. Here an expression is a step from the places
of a name that a match can have reached to those behind it: all ways through it are gone at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

Places = frozenset[int]
Step = Callable[[str, Places], Places]

LENGTH, DEPTH = 20_000, 8
"""The most characters of an expression, and groups inside each other."""
_ATOM = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|[^()|*+?{}\[\]\\]")
"""What stands for one character, or for a place between two."""
_TIMES = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<low>\d{1,3})(?P<comma>,?)(?P<high>\d{0,3})\})\??")
_OPEN, _CLOSE, _OR = re.compile(r"\((\?:|\?=|\?!|)"), re.compile(r"\)"), re.compile(r"\|")
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def matcher(expression: str) -> Callable[[str], bool]:
    """Whether a whole name matches, as `re.fullmatch` has it.

    Known are characters, classes, places, groups, alternatives, repetitions and looks ahead. Raises ValueError for
    anything else.
    """
    parser = _Parser(expression)
    try:
        step = parser.either()
    except re.error as error:
        raise ValueError(str(error)) from error
    if parser.at < len(expression) or len(expression) > LENGTH:
        raise ValueError(f"not understood from character {parser.at} on")
    return lambda name: len(name) in step(name, frozenset({0}))


@dataclass
class _Parser:
    """at: the character that is next. groups: the openings of those that it stands in."""

    text: str
    at: int = 0
    groups: tuple[str, ...] = ()

    def take(self, token: re.Pattern[str]) -> re.Match[str] | None:
        found = token.match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return found

    def either(self) -> Step:
        branches = [self.sequence()]
        while self.take(_OR):
            branches.append(self.sequence())
        return lambda name, places: frozenset().union(*(branch(name, places) for branch in branches))

    def sequence(self) -> Step:
        steps: list[Step] = []
        while (step := self.repeated()) is not None:
            steps.append(step)

        def run(name: str, places: Places) -> Places:
            for step in steps:
                if not places:
                    break
                places = step(name, places)
            return places

        return run

    def repeated(self) -> Step | None:
        step = self.group() or self.atom()
        times = None if step is None else self.take(_TIMES)
        if step is None or times is None:
            return step
        if times["sign"]:
            return _repeat(step, *_SIGNS[times["sign"]])
        low = int(times["low"])
        return _repeat(step, low, (int(times["high"]) if times["high"] else None) if times["comma"] else low)

    def atom(self) -> Step | None:
        found = self.take(_ATOM)
        if found is None:
            return None
        one = re.compile(found[0])
        return lambda name, places: frozenset(m.end() for place in places if (m := one.match(name, place)))

    def group(self) -> Step | None:
        opened = self.take(_OPEN)
        if opened is None:
            return None
        ahead = opened[1] in ("?=", "?!")
        if len(self.groups) == DEPTH or (ahead and {"?=", "?!"}.intersection(self.groups)):
            raise ValueError(f"groups inside each other at character {opened.start()}")
        around, self.groups = self.groups, (*self.groups, opened[1])
        step = self.either()
        self.groups = around
        if not self.take(_CLOSE):
            raise ValueError(f"the group at character {opened.start()} is not understood")
        if not ahead:
            return step
        wanted = opened[1] == "?="
        return lambda name, places: frozenset(p for p in places if bool(step(name, frozenset({p}))) is wanted)


def _repeat(step: Step, low: int, high: int | None) -> Step:
    def run(name: str, places: Places) -> Places:
        for _ in range(low):
            before, places = places, step(name, places)
            if places in (before, frozenset()):
                break
        reached = newest = places
        for _ in count() if high is None else range(high - low):
            newest = step(name, newest) - reached
            if not newest:
                break
            reached |= newest
        return reached

    return run
