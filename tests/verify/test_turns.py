"""Ranks as threads of which one runs at a time."""

from __future__ import annotations

import threading

import pytest

from megazero.verify.turns import RankFailed, Standstill, Turns


def test_results_come_in_order_of_rank_and_turns_are_the_same_each_time() -> None:
    orders = []
    for _ in range(2):
        turns, order = Turns(3), list[tuple[int, str]]()

        def work(rank: int, turns: Turns = turns, order: list[tuple[int, str]] = order) -> int:
            order.append((rank, "begins"))
            if rank == 0:
                turns.wait(rank, "word", "waiting for a word")
            elif rank == 2:
                turns.wake("word")
            order.append((rank, "ends"))
            return 10 * rank

        assert turns.run(work) == [0, 10, 20]
        orders.append(order)
    begun, ended = (0, "begins"), (0, "ends")
    assert orders[0] == orders[1] == [begun, (1, "begins"), (1, "ends"), (2, "begins"), (2, "ends"), ended]


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    turns = Turns(2)
    with pytest.raises(Standstill, match="2 ranks wait for each other for ever: rank 0 in word 0; rank 1 in word 1"):
        turns.run(lambda rank: turns.wait(rank, rank, f"word {rank}"))


def test_the_first_error_ends_all_ranks() -> None:
    turns, after = Turns(3), list[int]()

    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("no more")
        try:
            turns.wait(rank, "word", "waiting")
        except Exception:  # an error of another rank is not one that a program may take
            after.append(rank)
        after.append(rank)

    with pytest.raises(RankFailed, match="rank 1: ValueError: no more") as failed:
        turns.run(work)
    assert failed.value.rank == 1 and "in work" in failed.value.trace and not after
    assert turns.run(lambda rank: rank) == [0, 1, 2], "the turns can be taken again"


def test_an_interruption_comes_after_the_end_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks write into a folder that their caller removes. Ctrl-C comes while rank 1 has the turn, and rank 0 waits."""
    turns, has_turn = Turns(3), threading.Event()
    ended = list[int]()

    def work(rank: int) -> None:
        try:
            if rank == 1:
                has_turn.set()
                while turns._failure is None:  # until the main thread has been interrupted
                    pass
            turns.wait(rank, "word", "waiting")
        finally:
            ended.append(rank)

    def interrupted() -> None:
        has_turn.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "_wait_for_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        turns.run(work)
    assert sorted(ended) == [0, 1], "rank 2 has not begun"


def test_a_rank_that_keeps_the_turn_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a copy which nobody has started."""
    monkeypatch.setattr("megazero.verify.turns.PATIENCE", 0.1)
    for_ever = threading.Event()
    with pytest.raises(Standstill, match="a rank waits for ever: rank 1 in its own work for 0 s"):
        Turns(2).run(lambda rank: for_ever.wait() if rank else None)
    for_ever.set()
