"""Model state and activations as plain files in a folder: the same numbers as in memory, checkpoints in both
directions, and nothing left in the folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.parity.training import data_flags, small_model, train, worst

TOLERANCE = 1e-12
MODEL = [*small_model(4, heads=4), "--init-method-std", "0.1", "--precision", "fp64", "--lr", "1e-2"]
STEPS = ["--train-iters", "4", "--global-batch-size", "8", "--micro-batch-size", "2"]
ALL = "--offload-optimizer files --offload-params files --offload-gradients files"


class Case(NamedTuple):
    """A layout, and what of it leaves the device."""

    ranks: int
    layout: str
    offload: str


CASES = {
    "state": Case(1, "", "--offload-optimizer files"),
    "share": Case(1, "", "--offload-optimizer files:0.5"),
    "units": Case(1, "", "--offload-optimizer files:embedding,block-1 --offload-params files:block-1"),
    "sharded": Case(4, "--tp 2 --zero-stage 3", "--offload-optimizer files --offload-params files"),
    "stages": Case(4, "--pp 2 --zero-stage 2", "--offload-optimizer files --offload-gradients files"),
    "late": Case(2, "--zero-stage 1 --late-update", "--offload-optimizer files --offload-params files"),
    "vertical": Case(1, "--micro-batch-order vertical", ALL),
    "state on disks": Case(2, "--zero-stage 3", "--offload-optimizer nvme --offload-params files"),
    "whole steps": Case(1, "", "--offload-optimizer nvme --nvme-checkpoint --offload-params files"),
    "gradients on disks": Case(1, "", "--offload-optimizer files --offload-gradients nvme"),
    "activations": Case(1, "", "--offload-activations files --offload-optimizer nvme:0.5"),
}


def offload_flags(words: str, folder: Path) -> list[str]:
    """The flags, with the folders that they need."""
    flags = [word.replace("block-", "block ") for word in words.split()]
    for tier, option in (("files", "--files-path"), ("nvme", "--nvme-path")):
        if any(word.startswith(tier) for word in flags):
            (folder / tier).mkdir()
            flags += [option, str(folder / tier)]
    return [*flags, "--nvme-buffer-bytes", "1MB"]


def left(folder: Path) -> list[Path]:
    """What stands in the folders of files."""
    return [*folder.glob("files/*"), *folder.glob("nvme/*")]


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_a_run_in_memory(name: str, corpus: Path, tmp_path: Path) -> None:
    case = CASES[name]
    flags = [*MODEL, *STEPS, *data_flags(corpus, tmp_path / "cache"), *case.layout.split()]
    plain = train(case.ranks, flags)
    outcome = train(case.ranks, [*flags, *offload_flags(case.offload, tmp_path)])
    differences = worst(outcome, plain)
    assert max(differences.values()) < TOLERANCE, differences
    assert left(tmp_path) == []
    losses = [record.loss for record in plain.records]
    assert len({*losses}) == len(losses)


def test_swap_files_that_stay_leave_no_plain_files(corpus: Path, tmp_path: Path) -> None:
    """A run goes on from whole steps on disks, and rounds its parameters into files of its own."""
    model = [*MODEL, *STEPS, *data_flags(corpus, tmp_path / "cache")]
    flags = [*model, *offload_flags(CASES["whole steps"].offload, tmp_path)]
    train(1, [*flags, "--exit-interval", "2"])
    assert len(left(tmp_path)) == 2 == len([*(tmp_path / "nvme").iterdir()])
    straight, outcome = train(1, model), train(1, flags)
    assert [record.iteration for record in outcome.records] == [3, 4]
    assert max(worst(outcome, replace(straight, records=straight.records[2:])).values()) < TOLERANCE
    assert left(tmp_path) == []


def test_a_checkpoint_goes_into_files_and_out_of_them(corpus: Path, tmp_path: Path) -> None:
    """Two steps in memory, two in files with another layout, two in memory: as six in memory."""
    model = [*MODEL, *STEPS[2:], *data_flags(corpus, tmp_path / "cache"), "--save", str(tmp_path / "saved")]
    straight = train(1, [*model[:-2], "--train-iters", "6"])
    goes_on = ["--load", str(tmp_path / "saved"), "--train-iters", "6"]
    files = offload_flags(ALL, tmp_path)
    train(1, [*model, "--train-iters", "6", "--exit-interval", "2"])
    train(2, [*model, *goes_on, *files, "--zero-stage", "3", "--exit-interval", "4"])
    last = train(1, [*model, *goes_on])
    assert [record.iteration for record in last.records] == [5, 6] and left(tmp_path) == []
    for ours, theirs in zip(last.records, straight.records[4:], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
    assert all((last.weights[n] - weight).abs().max() < TOLERANCE for n, weight in straight.weights.items())
