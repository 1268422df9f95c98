"""A flag in a page's code font leads to its entry in the reference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

HOME = "reference/flags"
"""The page with an entry for each flag."""
_ENTRY = re.compile(r'^<a id="(?P<anchor>[\w-]+)"></a>(?P<spelled>.*)\n.*\n(?P<facts>.*)$', re.M)
_FLAG = re.compile(r"`(--?[a-z][\w-]*)`")
_UNBROKEN = 34
"""Characters of code that stay on one line: a browser would break a flag behind its first dash."""


@cache
def anchors(page: Path) -> Mapping[str, str]:
    """Every spelling of a flag -> where its entry is on this page, negations included."""
    return {
        flag: entry["anchor"]
        for entry in _ENTRY.finditer(page.read_text())
        for flag in _FLAG.findall(entry["spelled"] + entry["facts"])
    }


class FlagLinks(SphinxPostTransform):
    """`--tp 4` becomes a link, by its first word. Short code stays on one line."""

    default_priority = 200

    def run(self, **kwargs: object) -> None:
        if HOME not in self.env.found_docs:
            return
        known = anchors(Path(self.env.doc2path(HOME)))
        for literal in list(self.document.findall(nodes.literal)):
            if len(literal.astext()) <= _UNBROKEN:
                literal["classes"].append("unbroken")
            flag = literal.astext().split(" ")[0].split("=")[0]
            if flag in known and not isinstance(literal.parent, nodes.reference | nodes.title | nodes.strong):
                link = make_refnode(self.app.builder, self.env.docname, HOME, known[flag], literal.deepcopy())
                literal.replace_self(link)
