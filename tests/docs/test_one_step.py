"""The program of the page "One step by hand" prints what the page shows: the same text, on replicas and on stages.

Losses and norms are those of float64 to twelve digits, so they are the same on each machine.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands, fences, text_of

PAGE = "docs/how-it-works/one-step-by-hand.md"
STARTS = [command.line for command in commands(PAGE) if command.line.startswith("torchrun ")]
EXTRACTS = next(command.line for command in commands(PAGE) if command.line.startswith("sed "))
BLOCK = re.compile(r"^```(python|text)\n", re.M)


def shown() -> list[list[str]]:
    """The outputs on the page: those of the first command, and those of the second."""
    return [re.findall(r"^```text\n(.*?)^```$", part, re.M | re.S) for part in text_of(PAGE).split(STARTS[1])]


@cache
def printed(line: str, folder: Path) -> str:
    """What a start of the program prints, in a folder with the program that the page's own command has made."""
    subprocess.run(["sh", "-c", EXTRACTS.replace(" > one_step.py", f" > {folder}/one_step.py")], cwd=ROOT, check=True)
    words = shlex.split(line)
    assert words[0] == "torchrun"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(started, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-step")


def test_each_piece_that_prints_is_followed_by_its_output() -> None:
    """Only the last piece, which ends the program, prints nothing."""
    kinds = BLOCK.findall(text_of(PAGE).split(STARTS[1])[0])
    pieces = fences(PAGE, "python")
    assert kinds == ["python", "text"] * (len(pieces) - 1) + ["python"]
    assert "destroy_process_group" in pieces[-1]


@pytest.mark.slow
def test_the_first_command_prints_what_the_page_shows(folder: Path) -> None:
    assert printed(STARTS[0], folder) == "".join(shown()[0])


@pytest.mark.slow
def test_two_stages_print_the_same_results(folder: Path) -> None:
    on_stages, (lists, messages, results) = printed(STARTS[1], folder), shown()[1]
    assert lists in on_stages and messages in on_stages
    assert results in shown()[0] and on_stages.count(results) == 2, "by megazero and by plain torch"
    assert on_stages.endswith("the new weights differ by less than 1e-12: True\n")


def test_the_bytes_of_the_page_are_those_of_the_formulas() -> None:
    """Of a model of hidden size 16, counted here: what the page works out by hand."""
    hidden, words, length, item = 16, 32, 8, 8
    elements = 2 * (12 * hidden**2 + 13 * hidden) + (words + length) * hidden + (words + 2) * hidden
    text = text_of(PAGE)
    assert f"{elements:,}" in text and f"reduce_scatter of torch.float64: {elements * item} bytes" in text
    assert f"all_gather of torch.float64: {elements * item} bytes" in text
    assert f"send of torch.float64: {4 * length * hidden * item} bytes" in text
