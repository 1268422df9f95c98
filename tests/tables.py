"""Tables of cases as text, where tuples would take a line for each cell."""

from __future__ import annotations

import re


def rows(text: str) -> list[list[str]]:
    """The cells of every row, between bars. A line that is indented goes on with the row above.

    >>> rows("a | 1 | b c\\n    d |\\ne | 2 | f | g")
    [['a', '1', 'b c d', ''], ['e', '2', 'f', 'g']]
    """
    whole = re.sub(r"\n +", " ", text.strip("\n"))
    return [re.split(r" *\| *", line.rstrip()) for line in whole.split("\n")]
