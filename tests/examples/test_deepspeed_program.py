"""The program for DeepSpeed of the documentation, and what it is without an engine."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.examples.own_programs import EXAMPLES, LOSS, numbers, told_on

PROGRAM = EXAMPLES / "deepspeed_program.py"


def plainly() -> list[float]:
    """The losses of the program's lines by plain torch alone: the same module, samples and settings."""
    names = runpy.run_path(str(PROGRAM))
    torch.manual_seed(1)
    model, draw, losses = names["Layers"](64), torch.Generator().manual_seed(0), [0.0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01)
    for number in range(1, 401):
        points, target = names["samples"](draw)
        loss = F.mse_loss(model(points), target)
        (loss / 2).backward()
        losses[-1] += loss.item() / 200
        if number % 2 == 0:
            optimizer.param_groups[0]["lr"] = (
                2e-3 * min(max(number // 2 - 2, 0), 10) / 10
            )  # as DeepSpeed, one step late
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if number % 200 == 0:
            losses.append(0.0)
    return losses[:-1]


def test_it_equals_plain_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM)])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    losses = numbers(LOSS, capsys.readouterr().out)
    assert losses == pytest.approx(plainly(), abs=6e-4)  # what the lines round
    assert losses[-1] < 0.3 < losses[0]


def test_ranks_train(tmp_path: Path) -> None:
    losses = numbers(LOSS, told_on(2, PROGRAM.name, [], tmp_path))
    assert len(losses) == 2 and losses[-1] < 0.3
