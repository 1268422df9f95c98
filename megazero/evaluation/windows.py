"""Windows of documents for a model of limited context. Each token is scored in exactly one window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class Window:
    """A sequence that is scored in one forward pass.

    ids     n + 1 tokens: the model reads the first n and predicts the last n
    scored  the number of predictions that count, 1 to n. They are the last ones
    """

    ids: Ids
    scored: int

    def __post_init__(self) -> None:
        assert 1 <= self.scored < len(self.ids), f"{self.scored} of {len(self.ids) - 1} predictions"

    @property
    def length(self) -> int:
        """The number of tokens that the model reads."""
        return len(self.ids) - 1


def document_windows(ids: Ids, context: int, stride: int) -> Iterator[Window]:
    """Windows that score every token of a document except the first, once each.

    context  the most tokens that the model reads
    stride   the tokens that each window after the first scores, 1 to `context`: the first of them is predicted from at
             least context - stride + 1 tokens. With stride = context, consecutive windows share only one token

    The first window scores as many tokens as fit. The last one begins as early as the context allows. These are the
    windows of the LM Evaluation Harness (`get_rolling_token_windows`, whose context_len is context - stride + 1).
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
    """A window that scores `after`, with as many of the last tokens of `before` as fit in front.

    Raises ValueError if `after` is empty or longer than the context, or `before` is empty.
    """
    if not 1 <= len(after) <= context or not before:
        raise ValueError(
            f"a continuation of {len(after)} tokens after {len(before)} cannot be scored: 1 to {context} (the model's "
            "context) after at least one can"
        )
    return Window([*before, *after][-(context + 1) :], len(after))
