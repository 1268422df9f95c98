"""The pages: README and the sources of the site, with the commands and programs in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.extension.made import MADE

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=fence)\s*$", re.M | re.S)


def pages() -> list[str]:
    """Paths from the project's folder, README first."""
    site = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *site]


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def fences(page: str, language: str) -> list[str]:
    """The bodies of the page's blocks of a language."""
    return [found["body"] for found in FENCE.finditer(text_of(page)) if found["language"].strip() == language]


def prose(page: str) -> str:
    """The page without its blocks."""
    return FENCE.sub("", text_of(page))


def by_hand(page: str) -> str:
    """The page's prose without what the code makes of the page."""
    return MADE.sub("", prose(page))


@dataclass(frozen=True)
class Command:
    """A command line that a page gives to the reader."""

    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def commands(page: str) -> list[Command]:
    """The commands of the page's shell blocks, in order. A line that ends with a backslash continues on the next."""
    lines = (line for block in fences(page, "sh") for line in block.replace("\\\n", " ").splitlines())
    return [Command(page, " ".join(line.split())) for line in lines if line.strip() and not line.startswith("#")]


def all_commands() -> list[Command]:
    return [command for page in pages() for command in commands(page)]
