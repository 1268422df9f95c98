"""Pictures for a terminal: tables, pairs, lists, sections and the grid of ranks, as ASCII text of at most 100 columns.

The functions take plain numbers and strings.
"""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 100
_MOST_ROWS = 8
"""Of a drawn grid."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table with a rule under its headings; empty without rows. The first `left` columns are left-aligned, the others
    right-aligned.
    """
    if not rows:
        return ""
    widths = [max(len(line[i]) for line in [headings, *rows]) for i in range(len(headings))]

    def show(cells: Sequence[str]) -> str:
        return "  ".join(
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([show(headings), "  ".join("-" * w for w in widths), *(show(row) for row in rows)])


def pairs(entries: Sequence[tuple[str, str]], width: int = WIDTH - 2) -> str:
    """Lines of `name  value` with the values aligned, without entries that have no value. A long value is wrapped
    within its column.
    """
    entries = [(name, value) for name, value in entries if value]
    indent = max((len(name) for name, _ in entries), default=0) + 2
    lines = []
    for name, value in entries:
        parts = [part for line in value.splitlines() for part in _wrap(line, width - indent)]
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


def sections(*parts: tuple[str, str]) -> str:
    """The banner: each part under its title, without the empty parts."""
    shown = [(title, body) for title, body in parts if body]
    lines = [
        [title, *("  " + part for line in body.splitlines() for part in _wrap(line, WIDTH - 2))]
        for title, body in shown
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in lines)


def draw_grid(pp: int, dp: int, tp: int, *, cp: int = 1, width: int = WIDTH - 2) -> str:
    """The process grid: one column for each stage, one row for each replica; a cell lists its tensor-parallel ranks.

    Ranks are numbered as in `mpu.grid`: ((pp_i*DP + dp_i)*CP + cp_i)*TP + tp_i. If the drawing exceeds `width`, cells
    show ranges; if it still does, columns in the middle are left out. Of many rows, those in the middle are left out.
    """
    cells = [
        [[((p * dp + d) * cp + c) * tp + t for t in range(tp)] for p in range(pp)] for d in range(dp) for c in range(cp)
    ]
    names = [f"dp {d}" + (f" cp {c}" if cp > 1 else "") for d in range(dp) for c in range(cp)]
    kept_rows = _kept(len(cells), _MOST_ROWS)
    left = max(5, *(len(name) for name in names)) + 2
    for form, padding in ((_listed, 4), (_listed, 2), (span, 2), (span, 1)):
        texts = [[form(cell) for cell in row] for row in cells]
        cell = max(len(text) for row in texts for text in row) + padding
        if left + pp * (cell + 1) + 1 <= width:
            return _frame(texts, names, cell, left, kept_rows, list(range(pp)))
    cell += 1
    fitting = max(3, (width - left - 7) // (cell + 1))
    return _frame(texts, names, cell, left, kept_rows, _kept(pp, fitting))


def _listed(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 8 else span(ranks)


def span(numbers: Sequence[int]) -> str:
    """Consecutive numbers as the first and the last one: `1-10`."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _kept(number: int, most: int) -> list[int | None]:
    """Indices to show of `number` rows or columns; None stands for those that are left out."""
    if number <= most:
        return list(range(number))
    return [*range(most - 1), None, number - 1]


def _frame(
    texts: Sequence[Sequence[str]],
    names: Sequence[str],
    cell: int,
    left: int,
    rows: Sequence[int | None],
    cols: Sequence[int | None],
) -> str:
    """Draw the given rows and columns with their headings; None draws dots."""

    def across(parts: Sequence[str], gap: str, edge: str) -> str:
        return (
            edge
            + edge.join(
                gap if col is None else parts[col].center(cell, parts[col][:1] if edge == "+" else " ") for col in cols
            )
            + edge
        )

    rule = " " * left + across(["-"] * len(texts[0]), " ... ", "+")
    lines = ["stage".ljust(left) + across([str(i) for i in range(len(texts[0]))], " ... ", " ").rstrip(), rule]
    for row in rows:
        name, parts = ("...", ["..."] * len(texts[0])) if row is None else (names[row], texts[row])
        lines.append(name.ljust(left) + across(parts, " ... ", "|"))
    return "\n".join([*lines, rule])
