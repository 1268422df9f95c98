"""Each planted fault is caught by the test that the table names, and the table is true of the code as it is."""

from __future__ import annotations

import ast
import random
import re
from functools import cache

import pytest

from tests.planted.fault import Fault
from tests.planted.plant import ROOT, Copy, Judge, Verdict, faulty, judge_of
from tests.planted.report import Judged, suffices, table_of, words_of
from tests.planted.table import FAULTS

ROWS = [pytest.param(fault, id=fault.name) for fault in FAULTS]
QUICK = ("tests/data/", "tests/optim/", "tests/program/", "tests/telemetry/")
"""Rooms whose tests have no ranks: a fault takes them two seconds, most of which is imports."""
SAMPLE = 5


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy in which all named tests pass without a fault."""
    made = Copy(tmp_path_factory.mktemp("planted"))
    sound = made.sound(fault.test for fault in FAULTS)
    assert sound.passed, sound.output
    return made


def assert_caught(fault: Fault, copy: Copy) -> None:
    with copy.planted(fault):
        verdict = copy.test([fault.test])
    assert verdict.judge is not None, f"{fault.text} {fault.test} does not say so:\n{verdict.output}"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ROWS)
def test_it_is_caught(fault: Fault, copy: Copy) -> None:
    assert_caught(fault, copy)


@pytest.mark.slow
def test_some_quick_ones_are_caught(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests that they name run beside this one, without a fault."""
    quick = [fault for fault in FAULTS if fault.test.startswith(QUICK)]
    made = Copy(tmp_path_factory.mktemp("planted"))
    for fault in random.Random(seed).sample(quick, SAMPLE):
        assert_caught(fault, made)


@cache
def functions_of(path: str) -> set[str]:
    body = ast.parse((ROOT / path).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", ROWS)
def test_the_table_is_true(fault: Fault) -> None:
    """The line is there once, the file with the fault is Python, and the test exists."""
    sound = (ROOT / fault.path).read_text()
    assert ast.dump(ast.parse(faulty(sound, fault))) != ast.dump(ast.parse(sound))
    path, _, name = fault.test.partition("::")
    assert name.partition("[")[0] in functions_of(path)


def test_each_fault_is_there_once_and_says_where_it_comes_from() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 100
    assert len({(fault.path, fault.line, fault.planted) for fault in FAULTS}) == len(FAULTS)
    assert {fault.number for fault in FAULTS} - {None} <= {*range(1, 31)}
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.thread) for fault in FAULTS if fault.thread)


def test_forty_faults_are_from_public_threads() -> None:
    """Beside those of the list."""
    assert len({fault.name for fault in FAULTS if fault.number is None and fault.thread}) >= 40


@pytest.mark.parametrize(
    ("raised", "path", "judge"),
    [
        ("AssertionError: assert 1 == 2", "tests/fused_ops/test_softmax.py", Judge.TEST),
        ("Failed: DID NOT RAISE ValueError", "tests/zero/test_layout.py", Judge.TEST),
        ("torch.autograd.gradcheck.GradcheckError: Jacobian mismatch", "tests/mpu/test_functional.py", Judge.TEST),
        ("AssertionError: a bucket is reduced twice", "megazero/zero/reducer.py", None),
        ("AssertionError: no kernel", "fused_ops/adam.py", None),
        ("ImportError: no module", "tests/zero/toy.py", None),
        ("megazero.program.instruction.ProgramError: stage 0: no", "megazero/program/checker.py", Judge.CHECKER),
        ("megazero.program.moves.IllegalMove: it is elsewhere", "megazero/program/moves.py", Judge.CHECKER),
    ],
)
def test_what_counts_as_caught(raised: str, path: str, judge: Judge | None) -> None:
    """An assertion of a test, also on a rank, whose traceback comes behind that of the pool; and what the checker
    refuses.
    """
    here = f'Traceback (most recent call last):\n  File "/tmp/x/checkout/{path}", line 4, in f\n    f()\n{raised}\n'
    pool = 'Traceback (most recent call last):\n  File "/tmp/x/checkout/tests/ranks.py", line 9, in run\n    raise\n'
    assert judge_of(here) is judge
    assert judge_of(f"{pool}RuntimeError: rank 1 of 2 failed:\n{here}") is judge


def test_the_report_counts_what_is_caught_and_names_what_is_not() -> None:
    """One of fifty may be missed, two may not."""
    judged = [Judged(fault, Verdict(False, Judge.TEST, 1.0, "")) for fault in FAULTS[:50]]
    judged[7] = Judged(FAULTS[7], Verdict(True, None, 1.0, ""))
    assert suffices(judged) and words_of(judged).startswith("49 of 50 faults caught")
    assert words_of(judged).endswith(f"missed: {FAULTS[7].name}")
    assert table_of(judged).splitlines()[-1].split() == ["all", "50", "49", "49", "0", "50"]
    judged[9] = Judged(FAULTS[9], Verdict(False, None, 1.0, ""))
    assert not suffices(judged)
