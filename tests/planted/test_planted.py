"""Each planted fault is caught by the test that the table names, and the table is true of the code as it is."""

from __future__ import annotations

import ast

import pytest

from tests.planted.faults import FAULTS, Fault
from tests.planted.plant import ROOT, Copy, faulty, is_of_a_test

ROWS = [pytest.param(fault, id=f"{fault.number:02} {fault.name}") for fault in FAULTS]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy in which all named tests pass without a fault."""
    made = Copy(tmp_path_factory.mktemp("planted"))
    sound = made.test(list(dict.fromkeys(fault.test for fault in FAULTS)))
    assert sound.passed, sound.output
    return made


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ROWS)
def test_it_is_caught(fault: Fault, copy: Copy) -> None:
    with copy.planted(fault):
        verdict = copy.test([fault.test])
    assert verdict.caught, f"{fault.text} {fault.test} does not say so:\n{verdict.output}"


@pytest.mark.parametrize("fault", ROWS)
def test_the_table_is_true(fault: Fault) -> None:
    """The line is there once, the file with the fault is Python, and the test exists."""
    sound = (ROOT / fault.path).read_text()
    assert ast.dump(ast.parse(faulty(sound, fault))) != ast.dump(ast.parse(sound))
    path, _, name = fault.test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name.partition("[")[0] in functions


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) and {fault.number for fault in FAULTS} <= {
        *range(1, 31)
    }


@pytest.mark.parametrize(
    ("raised", "path", "counts"),
    [
        ("AssertionError: assert 1 == 2", "tests/fused_ops/test_softmax.py", True),
        ("AssertionError: a bucket is reduced twice", "megazero/zero/reducer.py", False),
        ("AssertionError: no kernel", "fused_ops/adam.py", False),
        ("ImportError: no module", "tests/zero/toy.py", False),
    ],
)
def test_what_counts_as_caught(raised: str, path: str, counts: bool) -> None:
    """An assertion of a test, also on a rank, whose traceback comes behind that of the pool."""
    here = f'Traceback (most recent call last):\n  File "/tmp/x/checkout/{path}", line 4, in f\n    f()\n{raised}\n'
    pool = 'Traceback (most recent call last):\n  File "/tmp/x/checkout/tests/ranks.py", line 9, in run\n    raise\n'
    assert is_of_a_test(here) is counts
    assert is_of_a_test(f"{pool}RuntimeError: rank 1 of 2 failed:\n{here}") is counts
