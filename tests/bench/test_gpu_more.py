"""The benchmark of a GPU's other kernels runs here, emulated: what only a card can time must start there at once."""

from __future__ import annotations

import sys

import pytest

from bench import gpu_more, launches
from fused_ops.native import library


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAZERO_FUSED", library.EMULATED)
    if library.cpu_library(library.EMULATED) is None:
        pytest.skip("no compiler, no kernels")


def test_other_kernels_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_more", "--rehearse"])
    gpu_more.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 14 and all(line.endswith("%") for line in lines)
    for words in ("one token is half", "with a scale of its own", "transposed by torch", "ranges at once"):
        assert any(words in line for line in lines)


def test_launches_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launches, "CALLS", 3)
    launches.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "column_sums_f32",
        "softmax_backward_f32",
        "adam_on_device_f32_f32",
    ]
