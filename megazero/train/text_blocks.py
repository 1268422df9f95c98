"""Tables, pairs, lists and sections, as ASCII text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 100


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table with a rule under its headings. The first `left` columns are left-aligned, the others right-aligned."""
    widths = [max(len(line[i]) for line in [headings, *rows]) for i in range(len(headings))]

    def show(cells: Sequence[str]) -> str:
        return "  ".join(
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([show(headings), "  ".join("-" * w for w in widths), *(show(row) for row in rows)])


def pairs(entries: Sequence[tuple[str, str]], width: int = WIDTH - 2) -> str:
    """Lines of `name  value` with the values aligned. A long value is wrapped within its column."""
    indent = max((len(name) for name, _ in entries), default=0) + 2
    lines = []
    for name, value in entries:
        parts = [part for line in value.splitlines() or [""] for part in _wrap(line, width - indent)]
        lines.append(name.ljust(indent) + parts[0])
        lines.extend(" " * indent + part for part in parts[1:])
    return "\n".join(line.rstrip() for line in lines)


def bullets(lines: Sequence[str], width: int = WIDTH - 2) -> str:
    """Sentences as a list with dashes. A long sentence is wrapped within its item."""
    return "\n".join(
        f"{'- ' if i == 0 else '  '}{part}" for line in lines for i, part in enumerate(_wrap(line, width - 2))
    )


def _wrap(text: str, width: int) -> list[str]:
    """Break a long line at spaces. A word that is longer than the width stays whole, so that a path can be copied."""
    if len(text) <= width:
        return [text]
    lines: list[str] = []
    for word in text.split(" "):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines or [""]


def sections(parts: Sequence[tuple[str, str]]) -> str:
    """The banner: each part under its title, without the empty parts."""
    shown = [(title, body) for title, body in parts if body]
    lines = [
        [title, *("  " + part for line in body.splitlines() for part in _wrap(line, WIDTH - 2))]
        for title, body in shown
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in lines)
