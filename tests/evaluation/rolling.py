"""The windows in which lm_eval scores a text, written down once more. `test_lm_eval.py` compares them with its own."""

from __future__ import annotations

from collections.abc import Iterator


def rolling_windows(ids: list[int], prefix: int, context: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens that are read, tokens that are predicted) of each window; each token is predicted once.

    The first window predicts as many tokens as are read at most, `context`, and each later one `stride` more.
    """
    known = [prefix, *ids]
    done = min(context, len(ids))
    if ids:
        yield known[:done], ids[:done]
    while done < len(ids):
        end = min(done + stride, len(ids))
        yield known[max(0, end - context) : end], ids[done:end]
        done = end
