"""The same files are written that DeepSpeed and Megatron-core have read, and stages are cut as DeepSpeed cuts them.

That the programs read these files is not seen here. `make test-all` sees it (`tests.convert.accepted.READERS`): the
programs read what `write` makes, and only then is it recorded. Where a test here fails because a writer was changed on
purpose, the programs have to judge the new files: `python -m tests.convert.accepted`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.convert.accepted import TIED, UNTIED, WRITTEN, balances, begins, digests, write
from tests.convert.accepted import recorded as accepted

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_was_read_by_the_program(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / name)
    found, wanted = digests(tmp_path / name), accepted()["files"][name]
    assert set(found) == set(wanted)
    assert [path for path in found if found[path] != wanted[path]] == []


@pytest.mark.parametrize(
    "recording", ["convert/accepted.json", "convert/written_there.json", "evaluation/harness_answers.json"]
)
def test_the_versions_are_those_that_are_installed_to_judge(recording: str) -> None:
    """Where a version is raised the programs have to be asked again."""
    recorded = json.loads((TESTS / recording).read_text())["versions"]
    lines = [line.partition(";")[0].strip() for line in (TESTS.parent / "constraints.txt").read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line)
    judges = {
        name: pins[name.replace("_", "-")] for name in recorded if name in ("deepspeed", "megatron-core", "lm_eval")
    }
    assert judges and {name: recorded[name] for name in judges} == judges


@pytest.mark.parametrize("ends", [0, 1], ids=["untied", "tied"])
def test_stages_are_cut_as_deepspeed_cuts_them(ends: int) -> None:
    for ((weights, pp), blocks), theirs in zip(balances(ends).items(), accepted()["begins"][str(ends)], strict=True):
        model = replace(TIED if ends else UNTIED, num_layers=blocks)
        assert begins(model, weights, pp) == theirs, (blocks, pp)
