"""Copies on a thread of their own, and who lets go of their tensors."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from megazero.system.copy_thread import Copied, CopyThread


def test_copies_are_made_in_order_and_their_tensors_let_go() -> None:
    thread = CopyThread(torch.device("cpu"), "copies")
    source, order = torch.arange(6.0), list[str]()
    targets = [torch.full((6,), -1.0) for _ in range(3)]
    copies = [
        thread.copy(targets[0], source, after=[lambda: order.append("first")]),
        thread.copy(targets[1], source[:0].new_tensor([7.0] * 6), after=[lambda: order.append("second")]),
        thread.copy(targets[2], source, wanted=lambda: False),
    ]
    for copied in copies:
        copied.result()
        assert copied._held == []
    thread.close()
    assert order == ["first", "second"]
    assert [target.tolist() for target in targets] == [[0, 1, 2, 3, 4, 5], [7.0] * 6, [-1.0] * 6]


def test_what_goes_wrong_before_a_copy_is_its_result() -> None:
    def wrong() -> None:
        raise OSError("the disk is gone")

    thread = CopyThread(torch.device("cpu"), "copies")
    copied = thread.copy(torch.zeros(2), torch.ones(2), after=[wrong])
    with pytest.raises(OSError, match="the disk is gone"):
        copied.result()
    thread.close()


def test_who_waits_goes_on_when_another_has_let_go() -> None:
    """Then the memory is freed by its last owner's thread, where a meter of that thread sees it."""
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    class Slow:
        """As a tensor: the interpreter's lock is free while it is let go."""

        def __del__(self) -> None:
            begun.set()
            go_on.wait()
            order.append("let go")

    def go_on_after() -> None:
        copied.result()
        order.append("went on")

    future: Future[None] = Future()
    future.set_result(None)
    held: list[Any] = [Slow()]
    copied = Copied(future, held)
    first = threading.Thread(target=copied.result)
    second = threading.Thread(target=go_on_after)
    first.start()
    begun.wait()
    second.start()
    second.join(timeout=0.1)  # it has time to go on too early
    go_on.set()
    first.join()
    second.join()
    assert order == ["let go", "went on"]
