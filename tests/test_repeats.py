"""The same tests twice: fresh processes have the same cases, another seed has others, and a failure comes again by the
command that is printed for it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repeats import HASH_SEED, SEED_FILE, seed_of_the_repository

ROOT = Path(__file__).resolve().parents[1]
LISTING = """
import json, sys
import pytest
from tests.test_repeats import listed

class Listing:
    def pytest_collection_finish(self, session):
        self.items = listed(session.items)

listing = Listing()
status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[listing])
open(sys.argv[1], "w").write(json.dumps(listing.items))
sys.exit(status)
"""
DRAWN = """
import random, subprocess, sys
import numpy, torch
from hypothesis import given, strategies as st

ORDER = "print(list({'all', 'these', 'words', 'in', 'some', 'order'}))"

def test_imports_modules_of_the_program_and_draws():
    import megazero.config.options
    random.random(), numpy.random.rand(), torch.rand(1)

@given(st.integers(), st.text())
def test_examples(number, text):
    print("drawn", number, ascii(text))

def test_generators():
    print("drawn", random.random(), numpy.random.rand(), torch.rand(1).item())

def test_sets():
    print("drawn", subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True).stdout)
"""
FAILING = """
import random
import pytest
from hypothesis import given, strategies as st

@pytest.mark.parametrize("name", ["it's one", "two"])
def test_odd(name, seed):
    assert seed % 2 == 0 or name == "two", f"drawn {random.Random(seed).random()} and {random.random()}"

@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_example(a, b):
    assert a % 11 != 3 or b < 1000, f"drawn {a} and {b}"
"""


def listed(items: list[pytest.Item]) -> list[list[str]]:
    """[node id, generated layout] of tests."""
    cases = [item.callspec.params.get("case", "") if hasattr(item, "callspec") else "" for item in items]
    return [[item.nodeid, re.sub(" at 0x[0-9a-f]+", "", str(case))] for item, case in zip(items, cases, strict=True)]


def collected(folder: Path, hash_seed: str, *words: str) -> list[list[str]]:
    """The tests that a fresh process would run."""
    out = folder / "items.json"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LISTING, str(out), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: list[list[str]] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_two_processes_collect_the_same_cases(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """This one and a fresh one, whatever the order of their sets. That a layout's text is in the list is seen by
    another seed's.
    """
    option, layouts = request.config.option, "tests/parity/test_layouts.py"
    words = ["--depth", option.depth, "--seed", str(option.seed)]
    words += ["--layouts", str(option.layouts)] if option.layouts else []
    other = "1" if os.environ.get(HASH_SEED) != "1" else "2"
    mine, theirs = listed(request.session.items), collected(tmp_path, other, *words, *request.config.args, layouts)
    files = {test.partition("::")[0] for test, _ in mine}
    same = [case for case in theirs if case[0].partition("::")[0] in files]
    if any(getattr(option, name, None) for name in ("keyword", "markexpr", "deselect", "lf")):
        chosen = {test for test, _ in mine}  # by words that the other process was not given
        same = [case for case in same if case[0] in chosen]
    assert mine == same
    drawn_here = [layout for test, layout in theirs if test.startswith(f"{layouts}::test_layout_equals")]
    others = [layout for test, layout in collected(tmp_path, "1", "--seed", "-1", layouts) if layout]
    assert len(drawn_here) == len(set(drawn_here)) > 5 and set(drawn_here) != set(others)


def run(folder: Path, *command: str, status: int = 0) -> str:
    """The output of a program in a folder whose tests have the set-up of these."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTEST_ADDOPTS": "-p tests.conftest -p no:cacheprovider",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def drawn(output: str) -> list[str]:
    return re.findall(r"drawn .*", output)


@pytest.mark.slow
def test_what_is_drawn_depends_on_the_seed_alone(tmp_path: Path) -> None:
    """Examples, the global generators and the order of sets do not depend on the tests before. hypothesis would take
    numbers from the modules that the first of them imports.
    """
    (tmp_path / "test_drawn.py").write_text(DRAWN)
    tests = sys.executable, "-m", "pytest", "-s"
    whole = drawn(run(tmp_path, *tests))
    assert len(whole) > 100 and whole == drawn(run(tmp_path, *tests, "-k", "not imports"))
    other = drawn(run(tmp_path, *tests, "--seed", str(seed_of_the_repository() + 1)))
    assert all(line not in other for line in (whole[50], *whole[-2:]))
    assert not (tmp_path / ".hypothesis" / "examples").exists()


@pytest.mark.slow
def test_exploring_prints_the_command_that_repeats_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(FAILING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # the folder to which names of tests are relative
    explored = run(tmp_path, sys.executable, "-m", "tests.explore", "--seed", "7", "-n", "1", status=1)
    commands = [line for line in explored.splitlines() if " -m pytest " in line]
    assert "rounds: 1, from seed 7; failures: 2\n" in explored and len(commands) == 4, "of the round, and at the end"
    assert set(commands[:2]) == set(commands[2:])
    again = [run(tmp_path, "bash", "-c", command, status=1) for command in commands[2:]]
    assert all("1 failed" in output and "passed" not in output for output in again)
    assert {*drawn(again[0]), *drawn(again[1])} == {*drawn(explored)}
    calm = run(tmp_path, sys.executable, "-m", "tests.explore", "--seed", "8", "-k", "odd")
    assert "failures: 0\n" in calm and " -m pytest " not in calm


def test_the_seed_is_a_number_in_a_file_of_its_own() -> None:
    assert SEED_FILE.read_text() == f"{seed_of_the_repository()}\n"
