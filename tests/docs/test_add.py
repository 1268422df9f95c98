"""The pages of docs/add: their files are there, names stand in their files, and few files are opened."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megazero.cli.main import SUBCOMMANDS
from megazero.config.flags import option_called

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "add").glob("*.md")) if page.stem != "index"}
MOST_FILES = 5
"""Of a table; a page may have several."""
STEP = re.compile(r"^\| (\d+) \| `([^`]+)` \| (.+) \|$", re.M)
NAMED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)+|[\w-]+\.(py|md|toml|json|yaml)")
SYMBOL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
ELSEWHERE = {"config.json", "pyproject.toml", "transformers", "model_type", "csrc", "megazero"}
ELSEWHERE |= {"torch.autograd.Function"}
"""What is not ours, or is every program's."""


@dataclass(frozen=True)
class Step:
    """A row of a page's table: a file to open, and what to write there."""

    page: str
    number: int
    path: str
    text: str

    @property
    def files(self) -> list[str]:
        """The files whose names the text uses: this one, or for a new file those that the text points to."""
        pointed = [name for name in NAMED.findall(self.text) if PATH.fullmatch(name) and name not in ELSEWHERE]
        return [*pointed, self.path] if "NAME" not in self.path else pointed


def steps(page: str) -> list[Step]:
    return [Step(page, int(number), path, text) for number, path, text in STEP.findall(PAGES[page])]


def without_programs(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)


@cache
def words(path: str) -> frozenset[str]:
    """What stands in a file; of Python what stands in its code, docstrings and comments left out."""
    text = (ROOT / path).read_text()
    if not path.endswith(".py"):
        return frozenset(re.findall(r"\w+", text))
    found, opens = set[str](), True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME or (token.type == tokenize.STRING and not opens):
            found |= set(re.findall(r"\w+", token.string))
        opens = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)
    return frozenset(found)


ALL_STEPS = [step for page in PAGES for step in steps(page)]


def test_there_are_fourteen_pages_and_the_index_has_them() -> None:
    index = (ROOT / "docs" / "add" / "index.md").read_text()
    assert len(PAGES) == 14 and set(re.findall(r"\]\((.*?)\.md\)", index)) == set(PAGES)
    counts = dict(re.findall(r"\]\((.*?)\.md\) \| (\d+)", index))
    for page, told in counts.items():
        most = max(step.number for step in steps(page))
        files = {"dataset-format": 2} | {long: len(steps(long)) for long in ("column", "tier")}
        assert int(told) == files.get(page, most), page


@pytest.mark.parametrize("page", PAGES)
def test_few_files_are_opened_in_order(page: str) -> None:
    numbers = [step.number for step in steps(page)]
    assert numbers and numbers[0] == 1
    for before, after in zip([0, *numbers], [*numbers, 1], strict=True):
        assert after in (before + 1, 1), f"{numbers} are no steps in order"
    assert max(numbers) <= MOST_FILES
    assert "## The test" in PAGES[page] and "tests/" in PAGES[page].split("## The test")[1]
    assert len(re.findall(r"^\| \d", PAGES[page], re.M)) == len(numbers), "a row that this test cannot read"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = [name for name in NAMED.findall(without_programs(page)) if PATH.fullmatch(name) and name not in ELSEWHERE]
    assert named
    for name in named:
        place = ROOT / name
        if "NAME" not in name:
            assert place.exists(), name
        else:
            parent = place.parent.parent if place.parent.name == "NAME" else place.parent
            assert parent.is_dir() and not place.exists(), name
    for link in re.findall(r"\]\(([\w-]+\.md)\)", PAGES[page]):
        assert (ROOT / "docs" / "add" / link).is_file(), link


@pytest.mark.parametrize("step", ALL_STEPS, ids=lambda step: f"{step.page}-{step.path}")
def test_every_name_of_a_step_stands_in_its_file(step: Step) -> None:
    assert step.files and all((ROOT / file).is_file() for file in step.files)
    near = frozenset().union(*(words(file) for file in step.files))
    named = [name for name in NAMED.findall(step.text) if not PATH.fullmatch(name) and name not in ELSEWHERE]
    for name in named:
        if name.startswith("--"):
            assert option_called(name), name
        elif name.startswith("megazero "):
            assert name.split()[1] in SUBCOMMANDS, name
        elif SYMBOL.fullmatch(name):
            assert set(name.split(".")) <= near, f"{name} is in none of {', '.join(step.files)}"
        else:
            raise AssertionError(f"{name!r} is neither a file, a flag nor a name")


@pytest.mark.parametrize("page", PAGES)
def test_every_other_name_of_a_page_stands_in_a_file_that_it_names(page: str) -> None:
    text = without_programs(page)
    files = [name for name in NAMED.findall(text) if PATH.fullmatch(name) and (ROOT / name).is_file()]
    there = frozenset().union(*(words(name) for name in files))
    prose = STEP.sub("", text)
    for name in NAMED.findall(prose):
        if PATH.fullmatch(name) or name in ELSEWHERE or name.startswith(("--", "megazero")):
            continue
        if SYMBOL.fullmatch(name):
            assert set(name.split(".")) <= there, f"{name} is in none of the page's files"


@pytest.mark.parametrize("page", PAGES)
def test_programs_are_python_and_import_what_is_there(page: str) -> None:
    for program in re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.M | re.S):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megazero"):
                file = Path(*str(node.module).split(".")).with_suffix(".py")
                assert {alias.name for alias in node.names} <= words(str(file)), node.module


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("page", ["flag", "column", "tier"])
def test_a_change_is_the_commit_that_its_page_names(page: str) -> None:
    """A page cannot promise fewer files than a change takes."""
    (subject,) = re.findall(r"The commits? \*(.+?)\* (?:is|are) this change", PAGES[page])
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no history of commits: this folder is no whole clone")
    commits = git("log", "--format=%H", f"--grep=^{subject}").split()
    touched = git("show", "--format=", "--name-only", *commits).splitlines()
    assert commits
    assert {step.path for step in steps(page)} == {name for name in touched if name and not name.endswith(".md")}
