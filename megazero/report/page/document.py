"""A page as one file: sections with the data that the script draws, the style and the script themselves. A browser
needs nothing else and asks no server for anything; the page's own policy forbids that it does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from megazero.report.page.parts import Fact
from megazero.system.durable import replace_file
from megazero.system.writable import why_not_replaced

KIND = "megazero page"
"""Stands in the first line of every page: such a file may be written again."""
HEAD = 64
"""Bytes in which `KIND` is looked for."""
SCRIPTS = "basics.js", "axes.js", "lines.js", "charts.js", "pictures.js", "gantt.js", "tables.js", "start.js"
"""In the order in which they stand in the page; each uses those before it."""
STYLES = "page.css", "parts.css"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_WITHOUT = "Charts are drawn by the page's own script, and scripts are switched off. Tables can be read without it."


@dataclass(frozen=True)
class PageSection:
    """A part of a page. title: its heading, which the page's list of contents has; html: what is below; data: what the
    script draws, by the name that `data-from` of an element in html gives.
    """

    title: str
    html: str
    data: Mapping[str, Any] = field(default_factory=dict)


def document(title: str, about: str, facts: Sequence[Fact], sections: Sequence[PageSection]) -> str:
    """A page. about: a sentence below the title."""
    anchors = [f"part-{number}" for number, _ in zip(count(1), sections)]
    named = [(anchor, section) for anchor, section in zip(anchors, sections, strict=True) if section.title]
    contents = "".join(f'<li><a href="#{anchor}">{escape(section.title)}</a></li>' for anchor, section in named)
    parts = "\n".join(_section(anchor, section) for anchor, section in zip(anchors, sections, strict=True))
    data = "\n".join(_data(name, value) for section in sections for name, value in section.data.items())
    return f"""<!doctype html><!-- {KIND} -->
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_static(STYLES)}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{escape(title)}</h1>
<p class="about">{escape(about)}</p>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
<button type="button" id="theme">Dark</button>
</header>
<main id="content" tabindex="-1">
<noscript><p class="warning">{_WITHOUT}</p></noscript>
{facts_html(facts)}
{parts}
</main>
{data}
<script>
"use strict";
(() => {{
{_static(SCRIPTS)}}})();
</script>
</body>
</html>
"""


def facts_html(facts: Sequence[Fact]) -> str:
    """Numbers side by side."""
    if not facts:
        return ""
    items = "".join(
        f'<div class="fact {escape(fact.tone)}"><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd>'
        + (f'<dd class="note">{escape(fact.note)}</dd>' if fact.note else "")
        + "</div>"
        for fact in facts
    )
    return f'<dl class="facts">{items}</dl>'


def note_html(note: str) -> str:
    """A paragraph; nothing without words."""
    return f'<p class="note">{escape(note)}</p>' if note else ""


def _section(anchor: str, section: PageSection) -> str:
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    return f'<section id="{anchor}">{heading}\n{section.html}\n</section>'


def _data(name: str, value: Any) -> str:
    """JSON inside HTML: no `<`, so that no word of it ends the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


@cache
def _static(names: tuple[str, ...]) -> str:
    folder = files("megazero.report.page") / "static"
    return "\n".join((folder / name).read_text("utf-8") for name in names)


def require_place(output: Path, flag: str) -> None:
    """Raise FileExistsError if a page may not be written there: something else than an earlier page is there, or the
    folder takes no file.
    """
    if (wrong := why_not_replaced(output, KIND, HEAD, "page of megazero")) is not None:
        raise FileExistsError(f"{flag} {output}: {wrong}")


def write_page(output: Path, flag: str, page: str) -> None:
    """Write a page, in the place of an earlier one; its folder is made. Raises FileExistsError as `require_place`."""
    require_place(output, flag)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        replace_file(Path(os.path.realpath(output)), page.encode(), uuid4().hex)
    except OSError as error:  # as of a full disk; it names the unfinished file, which takes the page's place
        raise OSError(f"{flag} {output}: is not written: {error.strerror}") from error
