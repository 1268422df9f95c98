"""Every token of a document is scored once, from as much context as was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.evaluation.perplexity import Windowing
from megazero.evaluation.windows import Window, continuation_window, document_windows
from tests.evaluation.rolling import rolling_windows


@given(length=st.integers(0, 60), context=st.integers(1, 12), data=st.data())
def test_each_token_once(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    ids = list(range(100, 100 + length))
    seen: list[int] = []
    for window in document_windows(ids, context, stride):
        places = [int(token) - 100 for token in window.ids]
        assert places == list(range(places[0], places[0] + len(places))), "a window is a stretch of the document"
        assert len(places) <= context + 1
        scored = places[-window.scored :]
        before = scored[0] - places[0]
        """Tokens that the first prediction that counts is made from."""
        assert before == 1 if places[0] == 0 and not seen else before >= min(context - stride + 1, scored[0])
        seen += scored
    assert seen == list(range(1, length))


@given(length=st.integers(0, 60), context=st.integers(1, 12), data=st.data())
def test_the_windows_of_the_harness(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    ids = list(range(100, 100 + length))
    wanted = []
    for read, predicted in rolling_windows(ids, 7, context, stride):
        wanted.append(([*read, predicted[-1]], len(predicted)))
    found = [
        ([int(token) for token in window.ids], window.scored) for window in Windowing(context, stride, 7).windows(ids)
    ]
    assert found == wanted


def test_no_prefix_and_short_documents() -> None:
    assert Windowing(4, 4).windows([]) == [] and Windowing(4, 4).windows([5]) == []
    assert Windowing(4, 4, 9).windows([]) == []
    ((only,), (first, second)) = Windowing(4, 4, 9).windows([5]), Windowing(4, 2).windows([1, 2, 3, 4, 5, 6])
    assert list(only.ids) == [9, 5] and only.scored == 1
    assert (list(first.ids), first.scored, list(second.ids), second.scored) == ([1, 2, 3, 4, 5], 4, [2, 3, 4, 5, 6], 1)


def test_continuations() -> None:
    assert continuation_window([1, 2, 3], [4, 5], 4) == Window([1, 2, 3, 4, 5], 2)
    assert continuation_window([1, 2, 3], [4, 5], 3) == Window([2, 3, 4, 5], 2)
    for before, after in (([1], []), ([], [1]), ([1], [2, 3, 4])):
        with pytest.raises(ValueError, match="cannot be scored"):
            continuation_window(before, after, 2)
