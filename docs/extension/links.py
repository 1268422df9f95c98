"""A flag in a page's code font leads to its entry in the reference."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

from docs.extension.options import all_options, anchor

HOME = "reference/flags"
"""The page with an entry for each flag."""
_UNBROKEN = 34
"""Characters of code that stay on one line: a browser would break a flag behind its first dash."""


@cache
def anchors() -> Mapping[str, str]:
    """Every spelling of a flag -> where its entry is."""
    return {spelled: anchor(option) for option in all_options() for spelled in (*option.flags, *option.negations)}


class FlagLinks(SphinxPostTransform):
    """`--tp 4` becomes a link, by its first word. Short code stays on one line."""

    default_priority = 200

    def run(self, **kwargs: object) -> None:
        if HOME not in self.env.found_docs:
            return
        for literal in list(self.document.findall(nodes.literal)):
            if len(literal.astext()) <= _UNBROKEN:
                literal["classes"].append("unbroken")
            flag = literal.astext().split(" ")[0].split("=")[0]
            if flag in anchors() and not isinstance(literal.parent, nodes.reference | nodes.title | nodes.term):
                link = make_refnode(self.app.builder, self.env.docname, HOME, anchors()[flag], literal.deepcopy())
                literal.replace_self(link)
