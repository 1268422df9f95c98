"""Docstrings of this project as Markdown.

They are plain text with `code` in single quotes of that kind. Some paragraphs are lists of names with what they mean,
two spaces or more between; lines that are indented by four stand as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_ENTRY = re.compile(r"(?P<name>[\w.*]+(?:, [\w.*]+)*)(?:  +|: +(?=\S))(?P<text>\S.*)")
_LISTED = re.compile(r"[\w.*]+(?:, [\w.*]+)*  +\S")
_NAMES = re.compile(r"[\w.*]+(?:, [\w.*]+)*")


def markdown(lines: Sequence[str]) -> list[str]:
    """The lines of a docstring, its first one's indentation already off, for a page."""
    made: list[str] = []
    for block in _blocks(lines):
        if all(line.startswith("    ") for line in block):
            made += ["```text", *(line[4:] for line in block), "```"]
        elif any(_LISTED.match(line) for line in block):
            made += _listed(block)
        else:
            made += [_inline(line.strip()) for line in block]
        made.append("")
    return made


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def _listed(block: Sequence[str]) -> list[str]:
    """A list with an item for each name; lines before the first one are a paragraph of their own."""
    lead: list[str] = []
    entries: list[tuple[str, list[str]]] = []
    for line, following in zip(block, [*block[1:], ""], strict=True):
        entry = _ENTRY.match(line) if _LISTED.match(line) else None
        if entry:
            entries.append((entry["name"], [entry["text"]]))
        elif _NAMES.fullmatch(line) and following.startswith("    "):  # names too long to have text beside them
            entries.append((line, []))
        elif entries:
            entries[-1][1].append(line.strip())
        else:
            lead.append(_inline(line.strip()))
    made = [*lead, ""] if lead else []
    return [*made, *(f"- `{name}`: {_inline(' '.join(text))}" for name, text in entries)]


def _inline(text: str) -> str:
    """`code` stays; all else that Markdown would take for marks of its own is escaped."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if len(part) > 2 and part[0] == part[-1] == "`" else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    return re.sub(r"([\\*`|<>]|(?<=\w)_(?=\W|$))", r"\\\1", text)
