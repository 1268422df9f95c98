"""The dynamic loss scale, step by step."""

from typing import Any

import pytest
import torch

from megazero.config.schema import OptimizerConfig
from megazero.optim.loss_scale import LossScaler


def run(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; "x" overflows, "." does not."""
    scales = []
    for step in overflows:
        scaler.update(torch.tensor(step == "x"))
        scales.append(scaler.scale.item())
    return scales


def scaler(**options: Any) -> LossScaler:
    settings: dict[str, Any] = {"initial_loss_scale": 64.0, "loss_scale_window": 3} | options
    return LossScaler(OptimizerConfig(precision="fp16", **settings))


def test_it_doubles_after_a_window_of_good_steps() -> None:
    assert run(scaler(), ".......") == [64, 64, 128, 128, 128, 256, 256]


def test_an_overflow_starts_the_window_anew() -> None:
    assert run(scaler(hysteresis=9), "..x...") == [64, 64, 64, 64, 64, 128]


def test_fault_15_with_hysteresis_1_every_overflow_halves_once() -> None:
    assert run(scaler(hysteresis=1), "x.xx") == [32, 32, 16, 8]


def test_hysteresis_lets_the_first_pass_until_it_doubles_again() -> None:
    assert run(scaler(hysteresis=2), "x.x.xx") == [64, 64, 32, 32, 16, 8]
    assert run(scaler(hysteresis=2), "xx...x.x") == [64, 32, 32, 32, 64, 64, 64, 32]
    assert run(scaler(hysteresis=3), "xxxx") == [64, 64, 32, 16]


def test_the_minimum_holds() -> None:
    assert run(scaler(hysteresis=1, min_loss_scale=20.0), "xxx") == [32, 20, 20]
    assert run(scaler(hysteresis=1, min_loss_scale=100.0), "x") == [64]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_fault_12_there_is_none_outside_fp16(precision: str) -> None:
    fixed = LossScaler(OptimizerConfig(precision=precision, loss_scale=8.0))
    assert run(fixed, "x..." * 3) == [1.0] * 12
    assert not fixed.dynamic and fixed.scale.dtype == torch.float64


def test_a_given_scale_stays() -> None:
    assert run(scaler(loss_scale=512.0), "x.....x") == [512.0] * 7


def test_it_continues_exactly() -> None:
    steps = "..x..x....xx...."
    whole = run(scaler(), steps)
    for cut in range(len(steps)):
        first, second = scaler(), scaler()
        run(first, steps[:cut])
        second.load_state_dict(first.state_dict())
        assert run(second, steps[cut:]) == whole[cut:]


def test_a_fixed_scale_is_not_loaded_over() -> None:
    fixed = LossScaler(OptimizerConfig(precision="bf16"))
    fixed.load_state_dict(scaler().state_dict())
    assert fixed.scale.item() == 1.0


@pytest.mark.parametrize(
    "before", [{"precision": "bf16"}, {"precision": "fp32"}, {"precision": "fp16", "loss_scale": 8.0}]
)
def test_a_scale_that_did_not_move_is_not_continued(before: dict[str, Any]) -> None:
    """A bf16 run resumed in fp16 began with bf16's scale, 1."""
    fresh = scaler()
    fresh.load_state_dict(LossScaler(OptimizerConfig(**before)).state_dict())
    assert run(fresh, "...") == [64, 64, 128]
