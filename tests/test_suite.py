"""The machinery of the tests themselves: samples of grids, skips in continuous integration, what tests cost, the pool
of ranks.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.costs import Costs, tree_seconds
from tests.ranks import run_ranks
from tests.sampling import Part, levels_left_out, part, sample, thinned
from tests.skips import SkipsAreFailures, in_ci

pytest_plugins = "pytester"

GRID = [dict(zip("abcd", values, strict=True)) for values in product("0123", "01", "012", "01234")]


def pairs(cases: list[dict[str, str]]) -> set[tuple[tuple[str, str], ...]]:
    return {pair for case in cases for pair in combinations(case.items(), 2)}


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_has_every_pair_of_values(seed: int) -> None:
    chosen = [GRID[number] for number in sample(GRID, 2, random.Random(seed))]
    assert pairs(chosen) == pairs(GRID)
    assert 20 <= len(chosen) <= 26, "5 x 4 values are 20 pairs at least; all cases are 120"


def test_a_sample_of_strength_one_has_every_value() -> None:
    chosen = [GRID[number] for number in sample(GRID, 1, random.Random(0))]
    assert {item for case in chosen for item in case.items()} == {item for case in GRID for item in case.items()}
    assert len(chosen) == 5


def test_cases_that_do_not_exist_are_not_asked_for() -> None:
    some = [case for case in GRID if case["a"] != case["b"]]
    assert pairs([some[number] for number in sample(some, 2, random.Random(0))]) == pairs(some) != pairs(GRID)


def test_the_seed_alone_decides() -> None:
    samples = [sample(GRID, 2, random.Random(seed)) for seed in (1, 2, 1)]
    assert samples[0] == samples[2] != samples[1]


@pytest.mark.slow
def test_what_runs_at_each_depth(pytester: pytest.Pytester) -> None:
    """A grid of 12, sampled or not; grids of which two cases are drawn, at any depth or for a check; one on kernels of
    two levels; what is slow.
    """
    items = pytester.getitems(
        """
        import pytest
        grid = [pytest.mark.parametrize(name, range(n)) for name, n in (("a", 2), ("b", 2), ("c", 3))]
        def on(marks, test):
            for mark in marks:
                test = mark(test)
            return test
        def test_all(a, b, c): ...
        def test_some(a, b, c): ...
        def test_two(a, c): ...
        def test_few(b, c): ...
        def test_level(a, level): ...
        def test_plain(): ...
        @pytest.mark.slow
        def test_slow(): ...
        @pytest.mark.slow
        @pytest.mark.lint
        def test_lint(): ...
        test_all, test_some = on(grid, test_all), on([*grid, pytest.mark.sampled], test_some)
        test_two = on([grid[0], grid[2], pytest.mark.sampled(cases=2)], test_two)
        test_few = on([*grid[1:], pytest.mark.few(cases=2)], test_few)
        test_level = on([grid[0], pytest.mark.parametrize("level", ["reference", "emulated"])], test_level)
        """
    )

    def counts(depth: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for item in thinned(items, depth, 0)[0]:
            name = "emulated" if "emulated" in item.name else item.name.partition("[")[0]
            found[name] = found.get(name, 0) + 1
        return found

    once = {"test_plain": 1, "test_slow": 1, "test_lint": 1}
    names = ("test_all", "test_some", "test_two", "test_few", "test_level", "emulated")
    every, sampled = (dict(zip(names, many, strict=True)) for many in ((12, 12, 6, 6, 2, 2), (12, 6, 2, 6, 2, 2)))
    assert counts("all") == every | once and counts("test") == sampled | once
    few = dict(zip(names[:-1], (3, 3, 2, 2, 2), strict=True))
    assert counts("check") == few | {"test_plain": 1, "test_lint": 1}


def test_parts_have_each_test_once(pytester: pytest.Pytester) -> None:
    items = pytester.getitems("import pytest\n@pytest.mark.parametrize('n', range(23))\ndef test(n): ...")
    parts = [Part(number, 5).of(items) for number in range(1, 6)]
    assert [item for inside, _ in parts for item in inside] == items
    assert {len(inside) for inside, _ in parts} == {4, 5}
    assert all(len(inside) + len(outside) == 23 for inside, outside in parts)


@pytest.mark.parametrize("text", ["0/5", "6/5", "1", "one/5", "1/0"])
def test_a_part_that_does_not_exist(text: str) -> None:
    assert part("5/5") == Part(5, 5)
    with pytest.raises(ValueError):
        part(text)


def test_one_lower_level_of_kernels_runs_beside_the_processors_own() -> None:
    levels = ["best", "good", "fair", "plain"]
    drawn = [levels_left_out("test", seed, levels, "good") for seed in range(20)]
    assert {frozenset(left) for left in drawn} == {frozenset({"fair"}), frozenset({"plain"})}
    assert levels_left_out("check", 0, levels, "good") == {"fair", "plain"}
    assert levels_left_out("all", 0, levels, "good") == levels_left_out("test", 0, levels, "plain") == set()


@pytest.mark.parametrize(("variable", "meant"), [("true", True), ("1", True), ("", False), ("false", False)])
def test_where_continuous_integration_is(variable: str, meant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", variable)
    assert in_ci() is meant


def test_a_skip_for_what_should_be_installed_fails(pytester: pytest.Pytester) -> None:
    extra = pytester.makepyfile(test_extra="import pytest\npytest.importorskip('an_extra')\ndef test(): ...")
    inside = pytester.makepyfile(
        test_inside="""
        import pytest
        def test_program(): pytest.skip("no nm, which lists the functions of a library")
        @pytest.mark.skipif(True, reason="torch finds no NVIDIA GPU on this machine")
        def test_card(): ...
        @pytest.mark.xfail(strict=True)
        def test_known(): assert False
        """
    )
    without = pytester.inline_run(extra, inside)
    without.assertoutcome(skipped=4)  # pytest counts the one that is expected to fail
    strict = pytester.inline_run(extra, inside, "--continue-on-collection-errors", plugins=[SkipsAreFailures()])
    strict.assertoutcome(failed=2, skipped=2)
    told = [str(report.longrepr) for report in strict.getfailures()]
    assert any("an_extra" in text for text in told) and any("no nm" in text for text in told), "what is missing is said"


def test_costs_count_what_runs_below(pytester: pytest.Pytester) -> None:
    burning = "import time\nwhile time.process_time() < 0.5: pass"
    test = pytester.makepyfile(
        f"import subprocess, sys\ndef test_below(): subprocess.run([sys.executable, '-c', {burning!r}], "
        "check=True)\ndef test_idle(): ..."
    )
    costs = Costs(5)
    pytester.inline_run(test, plugins=[costs]).assertoutcome(passed=2)
    spent = {name.partition("::")[2]: seconds for name, seconds in costs.seconds.items()}
    assert spent["test_below"] >= 0.45 and spent["test_idle"] < 0.2


def test_costs_do_not_depend_on_threads_that_end() -> None:
    """A process whose thread ends while it is looked at has not ended, and neither have its children."""
    ended = threading.Event()

    def start_others() -> None:
        while not ended.is_set():
            threading.Thread(target=ended.wait, args=(1e-4,)).start()

    starter = threading.Thread(target=start_others)
    starter.start()
    try:
        seconds = [tree_seconds(os.getpid()) for _ in range(300)]
    finally:
        ended.set()
        starter.join()
    assert seconds == sorted(seconds) and seconds[0] > 0


def identity(rank: int) -> tuple[int, int]:
    return os.getpid(), hash("a word")


def failing(rank: int) -> None:
    assert rank != 1, "as the test wants it"


def test_neighbours_order_their_sets_differently() -> None:
    """A program whose messages follow the order of a set must not pass because all ranks were forked
    from one process.
    """
    found = run_ranks(4, identity)
    assert len({pid for pid, _ in found}) == 4
    assert found[0][1] == found[2][1] != found[1][1] == found[3][1]


def test_a_rank_that_fails_costs_its_pool_and_no_more() -> None:
    before = run_ranks(2, identity)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed(.|\n)*as the test wants it"):
        run_ranks(2, failing)
    after = run_ranks(2, identity)
    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after)


@pytest.mark.slow
def test_workers_end_with_the_process_that_asked_for_them() -> None:
    """Killed, it can tell nobody."""
    program = (
        "import os; from tests.ranks import run_ranks; from tests.test_suite import identity; "
        "print(run_ranks(2, "
        "identity)[1][0]);"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program} os.kill(os.getpid(), 9)"], capture_output=True, text=True, check=False
    )
    (worker,) = done.stdout.split()
    # Its output is a pipe that the nurseries inherited: the run above returned when the last of them had ended.
    status = Path(f"/proc/{worker}/status")
    assert done.returncode == -9 and (
        not status.exists() or "State:\tZ" in status.read_text()
    )  # ended, if nobody has asked how yet
