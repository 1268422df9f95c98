"""Names of the program in code font are names that the program has: a page follows a rename."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.docs.pages import ROOT, by_hand, pages, text_of

ROOMS = sorted(path.name for path in (ROOT / "megazero").iterdir() if path.is_dir() and path.name[0] not in "._")
DOTTED = re.compile(rf"`((?:megazero\.|fused_ops\.|(?:{'|'.join(ROOMS)})\.)[\w.]+)(?:\(.*\))?`")
"""`mpu.exchange`, `zero.layout.pack`, `megazero.pretrain(run, ...)`: modules, then a name that stands there."""
CLASS = re.compile(r"`((?:[A-Z][a-z0-9]+){2,}(?:\.\w+)*)`")
"""`ChunkMap`, `SimulationReport.own_bubble`."""
THEIRS = {"SignalException", "TorchTrainer", "ShardedTensor", "config.json", "model.chat", "model.gguf", "report.html"}
THEIRS |= {"megazero.lr_decay_styles", "megazero.sinks"}
"""Names of other programs, of a page's own, and of groups of entry points."""


@cache
def source_words() -> frozenset[str]:
    """Every word of the program's sources."""
    files = [path for folder in ("megazero", "fused_ops") for path in (ROOT / folder).rglob("*.py")]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text()))


def is_there(name: str) -> bool:
    """Whether a dotted name is a room, a module, or stands in one."""
    parts = name.split(".")
    place = ROOT / parts.pop(0) if parts[0] in ("megazero", "fused_ops") else ROOT / "megazero"
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    file = place / "__init__.py" if place.is_dir() else place
    return not parts or (file.is_file() and set(parts) <= set(re.findall(r"\w+", file.read_text())))


def unknown_names(page: str) -> list[str]:
    text = by_hand(page)
    wrong = [name for name in CLASS.findall(text) if not set(name.split(".")) <= source_words()]
    wrong += [name for name in DOTTED.findall(text) if not is_there(name)]
    return [name for name in wrong if name not in THEIRS]


@pytest.mark.parametrize("page", pages())
def test_names_of_the_program_are_there(page: str) -> None:
    assert not unknown_names(page)


def test_modules_that_docstrings_and_comments_name_are_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("megazero", "fused_ops")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in DOTTED.findall(path.read_text())
        if not is_there(name) and name not in THEIRS
    ]
    assert not wrong, "\n".join(wrong)


def test_names_that_are_not_there_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = "`mpu.grid` `mpu.axes.Axes` `ChunkMap.holder` `megazero.pretrain(run)`"
    text = f"{right} `mpu.nowhere` `zero.layout.heap` `ChunkMopp`"
    monkeypatch.setattr("tests.docs.test_names.by_hand", lambda page: text)
    assert unknown_names("page") == ["ChunkMopp", "mpu.nowhere", "zero.layout.heap"]
    text_of.cache_clear()


def test_the_modules_of_the_large_rooms_are_there() -> None:
    """Those that the page on architecture lists by what they are for."""
    section = text_of("docs/architecture.md").split("## Inside the large rooms\n")[1].split("\n## ")[0]
    rooms = re.findall(r"^`megazero/(\w+)/`\n(.*?)(?=^`megazero|\Z)", section, re.M | re.S)
    named = [f"{room}/{name}" for room, table in rooms for name in re.findall(r"`(\w+)`", table)]
    assert len(rooms) == 6 and len(named) > 100
    assert not [name for name in named if not is_there(f"megazero.{name.replace('/', '.')}")]
