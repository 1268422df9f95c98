"""The layer that docs/how-to/verify-layout.md adds is proven, and the one with the fault is caught."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import fences
from tests.planted.plant import Copy

PAGE = "docs/how-to/verify-layout.md"
LAYER = "megazero/model/mlp.py"


def edited(sound: str, programs: list[str]) -> str:
    """The file with the page's three pieces of code where the page puts them."""
    built, computed, imported = programs
    down = re.search(r"^ *self\.down = .*\n", sound, re.M)
    computes = re.search(r"^ *return self\.down\(act\(.*\n", sound, re.M)
    first = re.search(r"^from torch import", sound, re.M)
    assert down is not None and computes is not None and first is not None
    pieces = [
        (first.start(), first.start(), f"{imported}\n"),
        (down.end(), down.end(), f"{built}\n"),
        (computes.start(), computes.end(), f"{computed}\n"),
    ]
    text = sound
    for start, stop, piece in reversed(pieces):
        text = text[:start] + piece + text[stop:]
    return text


@pytest.mark.slow
def test_a_layer_is_proven_and_a_subtle_fault_is_caught(tmp_path: Path) -> None:
    copy, programs = Copy(tmp_path), fences(PAGE, "python")
    path = copy.folder / LAYER
    good = edited(path.read_text(), programs)
    page = (Path(__file__).resolve().parents[2] / PAGE).read_text()
    (line,) = re.findall(r"^megazero (verify-layout .*swiglu.*)$", page, re.M)
    last = re.findall(r"^differs: (.*) relative error \.\.\.$", page, re.M)[0]
    assert good.count(", tp_partial=layout.tp.size > 1") == 1

    def verdict(layer: str) -> tuple[int, str]:
        path.write_text(layer)
        words = [sys.executable, "-B", "-m", "megazero", *shlex.split(line), "--certificate", str(tmp_path / "c.json")]
        done = subprocess.run(words, cwd=copy.folder, capture_output=True, text=True, check=False)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    status, told = verdict(good)
    assert status == 0 and "equal in" in told, told
    status, told = verdict(good.replace(", tp_partial=layout.tp.size > 1", ""))
    assert status == 1 and told.splitlines()[-1].startswith(f"differs: {last}"), told
