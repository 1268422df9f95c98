"""Each planted fault is caught by the test that the table names, and the table is true of the code as it is."""

from __future__ import annotations

import ast

import pytest

from tests.planted.faults import FAULTS, Fault
from tests.planted.plant import ROOT, Copy, faulty

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
