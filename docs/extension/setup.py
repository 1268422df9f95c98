"""A sphinx extension. The pages are plain Markdown; the site adds what Markdown cannot say.

- The side bar: a table of pages on an index page is its table of contents.
- A flag in a page's code font leads to its entry.
- Two pages are files of the project's folder: sphinx reads them, and a forge shows a link.

Nothing of megazero is imported, so the site needs neither megazero nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sphinx.application import Sphinx

from docs.extension.links import FlagLinks

INCLUDED: Mapping[str, str] = MappingProxyType({"CHANGELOG": "../CHANGELOG.md", "CONTRIBUTING": "../CONTRIBUTING.md"})
"""Pages whose text is a file outside the site's folder -> that file."""
_LISTED = re.compile(r"^\| \[[^\]]+\]\(([^)#]+)\.md\) \|", re.M)
"""The first cell of a row that lists a page."""


def setup(app: Sphinx) -> dict[str, Any]:
    """What sphinx calls."""
    app.add_post_transform(FlagLinks)
    app.connect("source-read", completed)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}


def completed(app: Sphinx, page: str, source: list[str]) -> None:
    """The source of a page as the site has it: `source` has one item, which is replaced."""
    if page in INCLUDED:
        source[0] = f"```{{include}} {INCLUDED[page]}\n:relative-docs: docs/\n```\n"
    elif page.rpartition("/")[2] == "index":
        source[0] += contents(source[0])


def contents(text: str) -> str:
    """The table of contents of the pages that an index page lists, for the side bar alone."""
    return "\n".join(["", "```{toctree}", ":hidden:", "", *listed(text), "```", ""])


def listed(text: str) -> list[str]:
    """The pages in the first column of an index page's tables, without their ending."""
    return _LISTED.findall(text)
