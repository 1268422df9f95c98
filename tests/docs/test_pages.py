"""What holds of every page: links lead somewhere, named files exist, the site builds, tables are complete."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from megazero.cli.main import SUBCOMMANDS
from megazero.config.options import run_options
from megazero.convert.names import TARGETS
from megazero.telemetry.record import StepRecord
from tests.docs.pages import ROOT, pages, prose, text_of

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)+/?|[\w.-]+/|[\w-]+\.(py|sh|h|cpp|cu|md|toml)")
"""A path of files. Names without a folder count where their ending is one that programs of the project have."""
ELSEWHERE = ("build/", "runs/", "iter_", "valid_loss/", ".bin/")
"""What paths begin with that a program writes, and what only looks like one."""
WEB = re.compile(r"https://[\w.-]+\.[a-z]{2,}(/[\w./%~#?=&+-]*)?$")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site spell them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def wrong_links(page: str) -> list[str]:
    here, wrong = ROOT / page, []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        there = (here.parent / path).resolve() if path else here
        if "://" in link:
            wrong += [] if WEB.match(link) else [link]
        elif not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    return wrong


def missing_paths(page: str) -> list[str]:
    """Paths in code font that are not there. A path begins in the project's folder, or in the page's own."""
    named = (name for name in CODE.findall(prose(page)) if PATH.fullmatch(name))
    places = (ROOT, (ROOT / page).parent)
    return [
        name
        for name in named
        if not (
            name.startswith(ELSEWHERE) or "NAME" in name or any((place / name.rstrip("/")).exists() for place in places)
        )
    ]


@pytest.mark.parametrize("page", pages())
def test_links_and_named_files_exist(page: str) -> None:
    assert not wrong_links(page)
    assert not missing_paths(page)


def test_wrong_links_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# One\n[a](no.md) [b](#two) [c](#one) [d](http://x) [e](https://example.org/a) [f](p.md#one)\n"
    (tmp_path / "p.md").write_text(text)
    monkeypatch.setattr("tests.docs.test_pages.ROOT", tmp_path)
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    assert wrong_links("p.md") == ["no.md", "#two", "http://x"]
    text_of.cache_clear()


def test_the_first_screen_says_it_all() -> None:
    screen = "\n".join(text_of("README.md").splitlines()[:30])
    for needed in (
        "make pretrain",
        "make test",
        "torchrun --nproc-per-node 48 pretrain_gpt.py --tp 4 --pp 12 --zero-stage 1",
    ):
        assert needed in screen


def test_the_readme_is_two_screens() -> None:
    assert len(text_of("README.md").splitlines()) <= 100


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` builds it: a name that leads nowhere is a warning, and a warning is an error."""
    if any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton")):
        pytest.skip("sphinx, myst-parser, furo and sphinx-copybutton are not installed")
    made = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    flags = (tmp_path / "reference" / "flags.html").read_text()
    assert 'id="flag-tp"' in flags and run_options()["tp"].sentence in flags
    assert 'href="../reference/flags.html#flag-zero-stage"' in (tmp_path / "how-to" / "layout.html").read_text()
    assert 'src="../_images/grid-' in (tmp_path / "how-it-works" / "grid.html").read_text()
    assert "What a user of megazero sees" in (tmp_path / "CHANGELOG.html").read_text()
    commands = (tmp_path / "reference" / "commands.html").read_text()
    assert not [
        name
        for name in SUBCOMMANDS
        if f'<section id="{name}">' not in commands or f"usage: megazero {name}" not in commands
    ]


def test_the_site_installs_its_packages_alone(tmp_path: Path) -> None:
    """Neither megazero nor torch, nor anything where all packages are there. The interpreter is a stand-in."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$2" in *sphinx*) exit $(cat {tmp_path}/status);; esac\n'
    )
    python.chmod(0o755)
    calls = []
    for status in ("0", "1"):
        (tmp_path / "status").write_text(status)
        subprocess.run([ROOT / "tools" / "install_docs.sh", tmp_path], check=True)
        calls.append((tmp_path / "calls").read_text().splitlines())
        (tmp_path / "calls").unlink()
    assert len(calls[0]) == 1 and calls[0][0].startswith("-c import sphinx"), "it installs what is there"
    declared = re.search(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    packages = re.findall(r'"([^"]+)"', declared[1])
    assert len(packages) == 4 and calls[1][-1] == f"-m pip install -c constraints.txt {' '.join(packages)}"


def first_cells(page: str) -> list[str]:
    """The names in the first column of the tables of a page."""
    cells = (line.split("|")[1] for line in text_of(page).splitlines() if line.startswith("| `"))
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_tables_of_metrics_and_formats_are_complete() -> None:
    assert first_cells("docs/reference/metrics.md") == [field.name for field in fields(StepRecord)]
    assert set(first_cells("docs/reference/checkpoint-formats.md")) == set(TARGETS)
