"""`megazero plan-schedule`: one line of JSON for each iteration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megazero.cli.plan_schedule import main, parse_iterations


def show(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(words) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_bloom_log(capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(capsys, "--preset", "bloom-176b", "--iterations", "1,100,12695,31214")
    assert [set(line) for line in lines] == [{"iteration", "consumed_samples", "lr", "global_batch_size"}] * 4
    assert [line["consumed_samples"] for line in lines] == [192, 19_200, 9_841_584, 47_768_496]
    assert [line["global_batch_size"] for line in lines] == [192, 192, 2048, 2048]
    assert [f"{line['lr']:.3E}" for line in lines] == ["0.000E+00", "6.229E-06", "5.969E-05", "5.279E-05"]
    assert lines[1]["lr"] == 6e-5 * 19_008 / 183_105, "at full precision"


def test_any_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--iterations=2-3 --tp 4 --pp 12 --train-samples 80 --global-batch-size 8 --lr 0.5 --lr-decay-style linear "
        "--lr-warmup-samples 16"
    )
    assert show(capsys, *words.split()) == [
        {"iteration": 2, "consumed_samples": 16, "lr": 0.25, "global_batch_size": 8},
        {"iteration": 3, "consumed_samples": 24, "lr": 0.5, "global_batch_size": 8},
    ]


def test_a_range_of_any_length_is_not_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_iterations("7,1-99999999999") == [range(7, 8), range(1, 10**11)]
    (line,) = show(capsys, "--iterations", "9000000000000000", "--train-iters", "10000000000", "--lr", "0.5")
    assert line["consumed_samples"] == 9000000000000000 * line["global_batch_size"]


@pytest.mark.parametrize(
    "words", ["0", "3-1", "1,", "", "-5", "1-2-3", "1.5", "\u0663", "9" * 17, "1-9007199254740993"]
)
def test_no_numbers_are_a_mistake(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--iterations", words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "1 problem" in said.err and f"--iterations {words}:" in said.err


def test_mistakes_end_with_2_and_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--iterations", "0", "--lr", "fast", "--sed", "3"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "3 problems" in said.err and "did you mean --seed?" in said.err
