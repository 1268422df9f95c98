"""Documents cut into windows that a model of limited context can score: each token counted in exactly one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class Window:
    """What is scored in one forward pass of a sequence.

    ids     n + 1 tokens: the model reads the first n and predicts the last n
    scored  how many predictions count, the last ones: 1 to n
    """

    ids: Ids
    scored: int

    def __post_init__(self) -> None:
        assert 1 <= self.scored < len(self.ids), f"{self.scored} of {len(self.ids) - 1} predictions"

    @property
    def length(self) -> int:
        """Tokens that the model reads."""
        return len(self.ids) - 1


def document_windows(ids: Ids, context: int, stride: int) -> Iterator[Window]:
    """Windows that score every token of a document but the first, once each.

    context  tokens that the model reads at most
    stride   tokens that a window scores where another comes before it, 1 to `context`: the first of them is predicted
             from at least context - stride + 1 tokens. With stride = context windows share nothing but the token at
             their edge

    The first window scores all it can; the last one reaches back as far as the context allows. These are the windows of
    the LM Evaluation Harness (`get_rolling_token_windows`, whose context_len is context - stride + 1).
    """
    assert 1 <= stride <= context
    stop = min(len(ids), context + 1)
    if stop > 1:
        yield Window(ids[:stop], stop - 1)
    while stop < len(ids):
        scored = min(stride, len(ids) - stop)
        stop += scored
        yield Window(ids[max(0, stop - context - 1) : stop], scored)


def continuation_window(before: Sequence[int], after: Sequence[int], context: int) -> Window:
    """A window that scores `after` behind as much of `before` as fits.

    Raises ValueError where even `after` does not.
    """
    if not 1 <= len(after) <= context or not before:
        raise ValueError(
            f"a continuation of {len(after)} tokens after {len(before)} cannot be scored: 1 to {context} (the model's "
            "context) after at least one can"
        )
    return Window([*before, *after][-(context + 1) :], len(after))
