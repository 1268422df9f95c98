"""What the code makes of the pages: between two comments, which no reader sees, stands what a maker gives.

    <!-- made by the code: drawing grid tp=2 pp=2 dp=3 -->
    ![Ranks of ...](../pictures/grid-tp2-pp2-dp3.svg)
    <!-- until here -->

`python -m docs.extension` writes all of it anew. So a page is plain Markdown wherever it is read, and a test holds that
nothing is old.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

from docs.extension import recipes, reference
from docs.extension.api import described
from docs.extension.drawings import DRAWINGS, argument

ROOT = reference.ROOT
PICTURES = Path("docs/pictures")
"""The folder of the drawings, from the project's."""
MADE = re.compile(
    r"(?P<head><!-- made by the code: (?P<words>[^\n]*) -->\n)(?P<body>.*?)(?P<end><!-- until here -->)", re.S
)

Maker = Callable[..., str]
"""(words behind the maker's name) -> Markdown."""

MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "flags": reference.flags,
        "settings": reference.settings,
        "commands": reference.commands,
        "helps": reference.helps,
        "kernels": reference.kernels,
        "python": described,
        "program": reference.program,
        "recipe": recipes.recipe,
        "too-large": recipes.too_large,
    }
)
"""The makers of text. `drawing` is the one maker beside them: what it makes is a file, and a link to that."""


@dataclass
class Made:
    """The pages and the drawings as the code makes them now: paths from the project's folder -> texts."""

    pages: dict[str, str] = field(default_factory=dict)
    drawings: dict[str, str] = field(default_factory=dict)


def sources(root: Path = ROOT) -> list[Path]:
    """The pages: README and the sources of the site."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def make(root: Path = ROOT) -> Made:
    """All pages with what the code makes of them, and all drawings that the pages name.

    Raises ValueError for a maker that is none, and for words that a maker does not take.
    """
    made = Made()
    for path in sources(root):
        page = str(path.relative_to(root))
        made.pages[page] = MADE.sub(partial(_anew, made, page), path.read_text())
    return made


def _anew(made: Made, page: str, place: re.Match[str]) -> str:
    name, *words = place["words"].split()
    try:
        body = _drawing(made, page, *words) if name == "drawing" else MAKERS[name](*words)
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as problem:
        raise ValueError(f"{page}: `{place['words']}` cannot be made: {problem!r}") from problem
    return f"{place['head']}{body.strip()}\n{place['end']}"


def _drawing(made: Made, page: str, name: str, *words: str) -> str:
    """A drawing by its name, with `name=number` for each of its arguments. A screen reader says the drawing's title."""
    picture = DRAWINGS[name](**dict(argument(word) for word in words))
    path = PICTURES / f"{'-'.join([name, *map(_short, words)])}.svg"
    made.drawings[str(path)] = picture
    title = ElementTree.fromstring(picture).findtext("{http://www.w3.org/2000/svg}title")
    return f"![{title}]({os.path.relpath(path, Path(page).parent)})"


def _short(word: str) -> str:
    """`micro_batches=8` as micro-batches8, `name=zb-v` as zb-v."""
    name, value = argument(word)
    return value if isinstance(value, str) else f"{name.replace('_', '-')}{value}"


def write(root: Path = ROOT) -> list[str]:
    """Bring pages and drawings up to date; drawings that no page names go. Returns the paths that changed."""
    made = make(root)
    stray = [path for path in (root / PICTURES).glob("*.svg") if str(path.relative_to(root)) not in made.drawings]
    texts = made.pages | made.drawings
    changed = [path for path, text in texts.items() if not (root / path).exists() or (root / path).read_text() != text]
    for path in changed:
        (root / path).write_text(texts[path])
    for drawing in stray:
        drawing.unlink()
    return changed + [str(path.relative_to(root)) for path in stray]
