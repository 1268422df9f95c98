"""Schedules of a configuration: their numbers by hand, and training by them beside plain torch."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megazero import deepspeed
from megazero.deepspeed.rates import schedule_of
from tests.deepspeed.grids import EXACT, SHARDED, ZERO, config_of, made_steps
from tests.deepspeed.models import CASES, MICRO_BATCHES, OPTIMIZER, Plain
from tests.ranks import run_ranks

RATES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("WarmupLR", {"warmup_num_steps": 4}, [0, 0, 0.01, 0.015849625007, 0.02, 0.02]),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 3, "warmup_type": "linear"},
        [0.01, 0.01, 0.023333333333, 0.036666666667, 0.05, 0.05],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 0.04, "warmup_type": "linear"},
        [0, 0, 0.02, 0.04, 0.03, 0.02, 0.01, 0],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 5, "warmup_num_steps": 3},
        [0, 0, 0.000630929754, 0.001, 0.001, 0.0005, 0, 0],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2},
        [0, 0.002, 0.013356735564, 0.02, 0.016, 0.008, 0.004, 0.004],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0},
        [0.01, 0.015, 0.02, 0.025, 0.03, 0.035],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
        [0.01, 0.01, 0.02, 0.02, 0.03, 0.03],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 2},
        [0.01, 0.03, 0.05, 0.03, 0.01, 0.01, 0.01],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.05,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 2,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
        },
        [0.01, 0.02, 0.03, 0.04, 0.05, 0.03, 0.01, 0.008, 0.006666666667],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.05,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 0,
        },
        [0.01, 0.01, 0.03, 0.03, 0.05, 0.04, 0.03, 0.02, 0.01],
    ),
    ("ExponentialLR", {"gamma": 0.5}, [0.02, 0.01, 0.005]),
]
"""Schedules, and the rates of the first steps as deepspeed 0.19.8 gives them to an optimizer with a rate of 0.02."""


def groups_in(kind: str, params: dict[str, Any], steps: int, groups: int = 1) -> list[list[dict[str, Any]]]:
    """By step and group, what an optimizer of torch has in so many steps of a schedule."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(groups)]
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in parameters], lr=0.02)
    schedule, seen = schedule_of({"type": kind, "params": params})(optimizer), []
    for _ in range(steps):
        seen.append([dict(group) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize(("kind", "params", "right"), RATES)
def test_a_schedule_has_the_rates_of_deepspeed(kind: str, params: dict[str, Any], right: list[float]) -> None:
    made = [group["lr"] for (group,) in groups_in(kind, params, len(right))]
    assert made == pytest.approx(right, abs=1e-12)


CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 2, "cycle_second_step_size": 1}
WITH_MOMENTUM = {**CYCLE, "cycle_min_mom": 0.7, "cycle_max_mom": 0.9, "decay_step_size": 2, "decay_mom_rate": 0.02}
LRS, MOMENTA = [0.01, 0.03, 0.05, 0.01, 0.01, 0.01], [0.7, 0.8, 0.7, 0.9, 0.909, 0.918]


def test_the_momentum_of_a_cycle_is_that_of_deepspeed() -> None:
    """Its first step has the lowest one, as in DeepSpeed, and not that of the formula."""
    seen = groups_in("OneCycle", WITH_MOMENTUM, 6)
    assert [group["betas"] for (group,) in seen] == [(pytest.approx(momentum), 0.99) for momentum in MOMENTA]
    alone = groups_in("OneCycle", {**WITH_MOMENTUM, "cycle_momentum": False}, 6)
    assert {group["betas"] for (group,) in alone} == {(0.9, 0.999)}


def test_lists_have_a_number_for_each_group() -> None:
    seen = groups_in("OneCycle", {**CYCLE, "cycle_max_lr": [0.05, 0.03], "cycle_min_mom": [0.7, 0.5]}, 3, 2)
    assert [[group["lr"] for group in groups] for groups in seen] == [
        pytest.approx(pair) for pair in ([0.01, 0.01], [0.03, 0.02], [0.05, 0.03])
    ]
    assert [group["betas"][0] for group in seen[1]] == pytest.approx([0.8, 0.7])
    with pytest.raises(ValueError, match=r"scheduler.params.cycle_max_lr has 2 numbers, and the optimizer 1 groups"):
        groups_in("OneCycle", {**CYCLE, "cycle_max_lr": [0.05, 0.03]}, 1)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no type": ("TwoCycles", {}, "scheduler.type 'TwoCycles' is not built; valid: WarmupLR"),
    "by a number": ("ReduceLROnPlateau", {}, "'ReduceLROnPlateau' is not built"),
    "no rate": ("OneCycle", {}, "OneCycle needs scheduler.params.cycle_min_lr"),
    "a key": ("OneCycle", {**CYCLE, "cycle_mom": 1}, "there is no scheduler.params.cycle_mom of OneCycle"),
    "no steps": ("LRRangeTest", {"lr_range_test_step_size": 0}, "a number of steps from 1 on"),
    "stairs": ("OneCycle", {**CYCLE, "cycle_first_stair_count": -1}, "a number from 0 on"),
    "a list": ("OneCycle", {**CYCLE, "decay_lr_rate": [0.1]}, r"decay_lr_rate \[0.1\] is no number"),
    "words": ("LRRangeTest", {"lr_range_test_staircase": "yes"}, "lr_range_test_staircase 'yes': valid: true, false"),
    "of torch": ("StepLR", {"gamma": 0.1}, "scheduler.params of torch's StepLR: missing a required argument"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule(name: str) -> None:
    kind, params, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        groups_in(kind, params, 1)


def test_a_momentum_that_the_optimizer_lacks() -> None:
    """Without the key DeepSpeed leaves it out, too."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule_of({"type": "OneCycle", "params": CYCLE})(optimizer)
    with pytest.raises(ValueError, match=r"cycle_momentum is true, and SGD has no betas"):
        schedule_of({"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": True}})(optimizer)


# --- training ------------------------------------------------------------------------------------------------------

CASE = CASES["tied by hand"]
"""With a tied table and frozen weights."""
SCHEDULE = {"type": "OneCycle", "params": WITH_MOMENTUM}


def right_weights(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, weights) by plain torch, with the numbers from above."""
    plain, losses = Plain(CASE.built(), MICRO_BATCHES), list[float]()
    for step in range(steps):
        plain.optimizer.param_groups[0].update(lr=LRS[step], betas=(MOMENTA[step], 0.99))
        losses.append(plain.one_step(CASE, step))
    return losses, plain.module_state_dict()


def cycled(rank: int, ranks: int, folder: str, names: list[str], steps: range) -> list[tuple[list[float], Any]]:
    """(losses, weights) of some layouts, of which each goes on from a folder of its name and saves there."""
    made = []
    for name in names:
        with TemporaryDirectory() as disks:
            config = config_of(ZERO[name], disks, ranks, optimizer=OPTIMIZER, scheduler=SCHEDULE)
            engine, _, _, _ = deepspeed.initialize(model=CASE.built(), config=config)
            engine.load_checkpoint(f"{folder}/{name}")
            assert engine.get_lr() == [pytest.approx(LRS[steps.start])]
            assert engine.get_mom() == [(pytest.approx(MOMENTA[steps.start]), 0.99)]
            losses = made_steps(engine, CASE, steps)
            engine.save_checkpoint(f"{folder}/{name}")
            made.append((losses, engine.module_state_dict()))
            engine.destroy()
    return made


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cycle_on_any_layout_and_behind_a_resume(tmp_path: Path, ranks: int) -> None:
    """The resume is in the middle of the cycle, on another number of ranks."""
    names = ["0", "1", "2, host", "3", "3, disk"]
    losses, weights = right_weights(6)
    first = run_ranks(ranks, cycled, ranks, str(tmp_path), names, range(3))
    then = run_ranks(3 - ranks, cycled, 3 - ranks, str(tmp_path), names, range(3, 6))
    for place in range(len(names)):
        made = [
            sum(of_rank[place][0][number] for of_rank in every) / len(every)
            for every, steps in ((first, 3), (then, 3))
            for number in range(steps)
        ]
        assert made == pytest.approx(losses, rel=EXACT)
        for of_rank in then:
            for key, value in weights.items():
                torch.testing.assert_close(of_rank[place][1][key], value, rtol=EXACT, atol=EXACT)


def test_a_cycle_of_torch_changes_the_betas() -> None:
    """OneCycleLR of torch, whose state does not have the momentum."""

    def parts(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=9)

    plain, module = CASE.built(), CASE.built()
    optimizer, rates = parts(plain)
    for step in range(4):
        optimizer.zero_grad()
        plain(*CASE.micro_batch(step, 0)).backward()
        optimizer.step()
        rates.step()
    mine, my_rates = parts(module)
    config = config_of(SHARDED, "", MICRO_BATCHES, gradient_clipping=0.0)
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=mine, lr_scheduler=my_rates, config=config)
    made_steps(engine, CASE, range(4))
    assert engine.get_mom() == [pytest.approx(optimizer.param_groups[0]["betas"])] != [(0.95, 0.999)]
    for key, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=EXACT, atol=EXACT)
    mine.param_groups[0]["betas"] = (1.5, 0.9)
    with pytest.raises(ValueError, match=r"betas of group 0 are \(1.5, 0.9\)"):
        made_steps(engine, CASE, range(4, 5))
    engine.destroy()
