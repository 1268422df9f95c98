"""Each planted fault is caught by the test that the table names, and by a proof where it is in what a proof runs.

The tables are true of the code as it is.
"""

from __future__ import annotations

import ast
import random
import re
from functools import cache

import pytest

from megazero.config.parse import parse_run
from tests.planted.fault import Fault
from tests.planted.layouts import LAYOUTS
from tests.planted.plant import ROOT, SOUND_SECONDS, Copy, Judge, Proven, Verdict, faulty, judge_of
from tests.planted.proofs import LOOKED_AT, layouts_of
from tests.planted.report import MAY_BE_MISSED, Judged, line_of, suffices, table_of, words_of
from tests.planted.table import FAULTS
from tests.planted.unseen import MISSED, UNSEEN

ROWS = [pytest.param(fault, id=fault.name) for fault in FAULTS]
QUICK = ("tests/data/", "tests/optim/", "tests/program/", "tests/telemetry/")
"""Rooms whose tests have no ranks: a fault takes them two seconds, most of which is imports."""
SAMPLE, PROVEN = 5, 2
TO_PROVE = [fault for fault in FAULTS if layouts_of(fault)]


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


@pytest.fixture(scope="module")
def proven_copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy in which all layouts are equal without a fault."""
    made = Copy(tmp_path_factory.mktemp("proven"))
    proof = made.prove([*LAYOUTS], SOUND_SECONDS)
    assert proof.layouts == (*LAYOUTS,) and not proof.told and not proof.refused, proof.output
    return made


def assert_seen(fault: Fault, copy: Copy) -> None:
    with copy.planted(fault):
        proof = copy.prove(layouts_of(fault))
    assert proof.judge is Judge.PROOF, f"{fault.text} No proof says so:\n{proof.output}"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [pytest.param(each, id=each.name) for each in TO_PROVE if each.name not in MISSED])
def test_a_proof_sees_it(fault: Fault, proven_copy: Copy) -> None:
    assert_seen(fault, proven_copy)


@pytest.mark.slow
def test_a_proof_sees_some(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of the model and of what is below it. Their layout is equal without a fault: `tests.verify` says so of others."""
    made = Copy(tmp_path_factory.mktemp("proven"))
    assert not made.prove(["tensor"]).told
    cheap = [fault for fault in TO_PROVE if layouts_of(fault)[0] == "tensor"]
    for fault in random.Random(seed).sample(cheap, PROVEN):
        assert_seen(fault, made)


def test_each_fault_has_layouts_or_a_reason() -> None:
    """A fault that a proof cannot see is named once. Each layout is looked at, and is a legal one."""
    unseen = [name for _, names in UNSEEN for name in names]
    assert len({*unseen}) == len(unseen) == len(FAULTS) - len(TO_PROVE) and {*unseen} < {fault.name for fault in FAULTS}
    assert {*MISSED} <= {fault.name for fault in TO_PROVE} and len(MISSED) <= MAY_BE_MISSED * len(TO_PROVE)
    assert {name for _, names in LOOKED_AT for name in names.split()} == {*LAYOUTS}
    assert {name for fault in TO_PROVE for name in layouts_of(fault)} == {*LAYOUTS}
    for layout in LAYOUTS.values():
        parse_run(layout.words, layout.ranks)


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


@pytest.mark.parametrize(
    ("told", "named"),
    [
        (
            "the gradient of head.norm.weight at backward (micro-batch 0, chunk 0), step 1 from the seed, on rank 1",
            True,
        ),
        ("the loss at norm, step 4 resumed from its own checkpoint, on rank 0 (stage 0, dp 0, tp 0)", True),
        ("from the seed: rank 0: ProgramError: stage 0: number 72 of its list, norm, reads the gradient", True),
        (
            "from the seed: 8 ranks wait for each other for ever: rank 0 in all-reduce of ranks 1; and 4 more (norm)",
            True,
        ),
        ("from the seed: rank 1: RuntimeError: it is small (reduce gradients (bucket 0))", True),
        ("from the seed: rank 2: ValueError: tuple.index(x): x not in tuple", False),
    ],
)
def test_what_is_named(told: str, named: bool) -> None:
    assert Proven(Judge.PROOF, ("grid",), f"differs: {told}", (), 1.0, "").is_named is named


def judged(name: str, test: Judge | None, proof: Judge | None, told: str = "") -> Judged:
    """Of a fault that was planted, what two judges have said."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    asked = Proven(proof, ("grid",), told, (), 2.0, "") if layouts_of(fault) else None
    return Judged(fault, Verdict(test is None, test, 1.0, ""), asked)


def test_the_report_counts_what_is_caught_and_names_what_is_not() -> None:
    """One of fifty may be missed, two may not, by either judge."""
    told = "differs: the gradient of head.norm.weight at norm, step 1 from the seed, on rank 0: relative error 1"
    seen = [judged(fault.name, Judge.TEST, Judge.PROOF, told) for fault in TO_PROVE[:50]]
    first, second = (fault.name for fault in TO_PROVE[7:9])
    for test, proof in ((None, Judge.PROOF), (Judge.TEST, None)):
        seen[7] = judged(first, test, proof)
        assert suffices(seen)
        assert suffices([*seen[:8], judged(second, test, proof), *seen[9:]]) is False
    words = words_of(seen).splitlines()
    assert words[0] == "50 of 50 faults caught"
    assert words[1].startswith("verify-layout: 49 of 50 faults") and words[1].endswith(f"missed: {first}")
    assert table_of(seen).splitlines()[-1].split() == ["all", "50", "50", "50", "0", "50", "49", "150"]


def test_the_report_says_why_a_proof_cannot_see_a_fault() -> None:
    both = [
        judged("YaRN without its factor", Judge.TEST, None),
        judged("adjoint divided by tp", None, Judge.PROOF, "x"),
    ]
    words = words_of(both)
    assert "1 of 2 faults caught; missed: adjoint divided by tp" in words
    assert "1 of 1 faults that lie in what it runs, of 0 the value" in words
    assert "1 not in what it runs, another function" in words
    assert "no proof: another function" in line_of(both[0]) and line_of(both[1]).endswith("proof (grid) x, 2.0 s")
