"""Groups of parameters with options of their own, and schedules of each, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import megazero
from megazero import deepspeed
from tests.deepspeed.grids import EXACT, SHARDED, ZERO, config_of, made_steps
from tests.deepspeed.models import CASES, CLIP, MICRO_BATCHES, OPTIMIZER, RATE
from tests.ranks import run_ranks

Groups = list[dict[str, Any]]
STEPS = 4


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def by_shape(module: nn.Module, **of_first: Any) -> Groups:
    """Matrices, vectors without weight decay, and the first parameter with options of its own; frozen ones too."""
    first, *others = module.parameters()
    return [
        {"params": [each for each in others if each.dim() > 1]},
        {"params": [each for each in others if each.dim() < 2], "weight_decay": 0.0},
        {"params": [first], "lr": 0.3 * RATE, **of_first},
    ]


BETAS = {"betas": (0.6, 0.95), "eps": 1e-4, "weight_decay": 0.2}
ADAMW = OPTIMIZER["params"]
Made = tuple[Callable[[nn.Module], dict[str, Any]], Callable[[nn.Module], torch.optim.Optimizer]]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(by_shape(module, **BETAS), **ADAMW)  # type: ignore[arg-type]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(by_shape(module, momentum=0.5), lr=RATE, momentum=0.9, weight_decay=0.1)


def rmsprop(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=RATE, weight_decay=0.1)


WAYS: dict[str, Made] = {
    "configured": (lambda module: {"model_parameters": by_shape(module, **BETAS)}, adamw),
    "given": (lambda module: {"optimizer": adamw(module)}, adamw),
    "given sgd": (lambda module: {"optimizer": sgd(module)}, sgd),
    "maker": (
        lambda module: {"optimizer": rmsprop, "model_parameters": by_shape(module, alpha=0.9)},
        lambda module: rmsprop(by_shape(module, alpha=0.9)),
    ),
    "one": (
        lambda module: {"model_parameters": module.named_parameters()},
        lambda module: torch.optim.AdamW(trained(module), **ADAMW),  # type: ignore[arg-type]
    ),
}
"""What the program hands over, and plain torch's optimizer."""


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Another one for each group."""
    return LambdaLR(optimizer, [_slope(number) for number in range(len(optimizer.param_groups))])


def _slope(number: int) -> Callable[[int], float]:
    return lambda step: 1 / (1 + 0.3 * (number + 1) * step)


def by_hand(optimizer: torch.optim.Optimizer, step: int) -> None:
    """What a program changes in front of a step."""
    if step == 2:
        optimizer.param_groups[0]["weight_decay"] = 0.4


def plainly(case_name: str, way: str) -> dict[str, Tensor]:
    case = CASES[case_name]
    module = case.built()
    optimizer = WAYS[way][1](module)
    rates = schedule(optimizer)
    for step in range(STEPS):
        by_hand(optimizer, step)
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            (module(*case.micro_batch(step, number)) / MICRO_BATCHES).backward()
        for parameter in trained(module):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        nn.utils.clip_grad_norm_(trained(module), CLIP)
        optimizer.step()
        rates.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


right_weights = cache(plainly)


def engine_of(case_name: str, way: str, zero: str, folder: str, ranks: int) -> deepspeed.DeepSpeedEngine:
    module = CASES[case_name].built()
    handed = WAYS[way][0](module)
    config = config_of(ZERO[zero], folder, ranks, **({} if "optimizer" in handed else {"optimizer": OPTIMIZER}))
    return deepspeed.initialize(model=module, lr_scheduler=schedule, config=config, **handed)[0]


def steps_by_hand(engine: deepspeed.DeepSpeedEngine, case_name: str, steps: range) -> None:
    for step in steps:
        by_hand(engine.optimizer, step)
        made_steps(engine, CASES[case_name], range(step, step + 1))


def on_rank(rank: int, ranks: int, case_name: str, way: str, zeros: list[str]) -> list[dict[str, Tensor]]:
    made = []
    for zero in zeros:
        with TemporaryDirectory() as folder:
            engine = engine_of(case_name, way, zero, folder, ranks)
            steps_by_hand(engine, case_name, range(STEPS))
            groups = engine.optimizer.param_groups
            assert engine.get_lr() == [group["lr"] for group in groups]
            held = {id(each) for group in groups for each in group["params"]}
            assert held <= {id(each) for each in engine.module.parameters()}
            made.append(engine.module_state_dict())
            engine.destroy()
    return made


def require_right(made: dict[str, Tensor], case_name: str, way: str) -> None:
    for key, value in right_weights(case_name, way).items():
        torch.testing.assert_close(made[key], value, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_groups_on_any_layout(way: str, ranks: int) -> None:
    """With a tied table and frozen weights, several micro-batches, and clipping over all groups."""
    name = "tied by hand"
    for of_rank in run_ranks(ranks, on_rank, ranks, name, way, [*ZERO]):
        for made in of_rank:
            require_right(made, name, way)


@pytest.mark.parametrize("name", ["perceptron", "recurrent", "handing on"])
def test_groups_of_any_module(name: str) -> None:
    """One that is used twice, one that is never called, lists of parameters, and one micro-batch on each of four."""
    for of_rank in run_ranks(MICRO_BATCHES, on_rank, MICRO_BATCHES, name, "configured", ["3"]):
        require_right(of_rank[0], name, "configured")


def resumed(rank: int, ranks: int, folder: str, zero: str, steps: range) -> dict[str, Tensor]:
    with TemporaryDirectory() as disks:
        engine = engine_of("perceptron", "configured", zero, disks, ranks)
        engine.load_checkpoint(folder)
        assert engine.optimizer.param_groups[0]["weight_decay"] == (0.4 if steps.start > 2 else 0.1)
        steps_by_hand(engine, "perceptron", steps)
        engine.save_checkpoint(folder)
        made = engine.module_state_dict()
        engine.destroy()
    return made


def test_rates_and_changed_options_come_back(tmp_path: Path) -> None:
    run_ranks(2, resumed, 2, str(tmp_path), "3, host", range(3))
    require_right(run_ranks(1, resumed, 1, str(tmp_path), "1", range(3, STEPS))[0], "perceptron", "configured")
    one = deepspeed.initialize(model=CASES["perceptron"].built(), config=config_of(SHARDED, "", 1, optimizer=OPTIMIZER))
    with pytest.raises(ValueError, match="the checkpoint is of an optimizer with 3 groups of parameters, and this one"):
        one[0].load_checkpoint(tmp_path)
    one[0].destroy()


def test_a_checkpoint_of_an_engine_of_units(tmp_path: Path) -> None:
    """It has no groups: its rate is that of all, and what the program kept comes back as the client's state."""
    layers = [nn.Linear(3, 4), nn.Linear(4, 1)]
    with megazero.engine(megazero.Model(layers, loss=squares, input="x"), "adamw", 0.25) as units:
        units.step({"x": torch.ones(2, 3)})
        units.save(tmp_path, {"next": 7})
        right = units.state_dict()
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    config = config_of({"stage": 0}, "", MICRO_BATCHES, optimizer=OPTIMIZER)
    engine = deepspeed.initialize(model=module, model_parameters=by_shape(module), config=config)[0]
    path, state = engine.load_checkpoint(tmp_path)
    assert path is not None and state == {"next": 7} and engine.global_steps == 1 and engine.get_lr() == [0.25] * 3
    engine.eval()(torch.ones(2, 3))
    assert all(torch.equal(value, right[name]) for name, value in engine.module_state_dict().items())
    engine.destroy()


def squares(made: Tensor, batch: Any) -> tuple[Tensor, int]:
    return made.square().sum(), len(made)


def test_groups_hold_parameters_that_had_no_values() -> None:
    """The engine makes other objects of those on the meta device, and a program finds them in its groups."""
    with deepspeed.zero.Init(dtype=torch.float64):
        module = CASES["perceptron"].make()
    handed: dict[str, Any] = {"model_parameters": by_shape(module, **BETAS)}
    config = config_of(SHARDED, "", 1, optimizer=OPTIMIZER)
    engine = deepspeed.initialize(model=module, config=config, **handed)[0]
    shapes = [[each.shape for each in group["params"]] for group in engine.optimizer.param_groups]
    made_steps(engine, CASES["perceptron"], range(1))
    assert [[each.shape for each in group["params"]] for group in engine.optimizer.param_groups] == shapes
    held = {id(each) for group in engine.optimizer.param_groups for each in group["params"]}
    assert held == {id(each) for each in module.parameters()}
    engine.destroy()


def of_other_groups(rank: int) -> str:
    module = CASES["perceptron"].built()
    groups = by_shape(module)
    groups = groups[:1] + groups[:0:-1] if rank else groups
    config = config_of(SHARDED, "", 2, optimizer=OPTIMIZER)
    engine = deepspeed.initialize(model=module, model_parameters=groups, config=config)[0]
    try:
        engine(*CASES["perceptron"].micro_batch(0, 0))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_of_other_groups() -> None:
    assert all("the ranks have other groups of parameters" in words for words in run_ranks(2, of_other_groups))


def test_another_group_behind_the_engine() -> None:
    module = CASES["perceptron"].built()
    engine = engine_of("perceptron", "given", "1", "", 1)
    made_steps(engine, CASES["perceptron"], range(1))
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="the optimizer has 4 groups of parameters now, and had 3"):
        made_steps(engine, CASES["perceptron"], range(1, 2))
    engine.destroy()
    twice = partial(deepspeed.initialize, model=module, config=config_of(SHARDED, "", 1, optimizer=OPTIMIZER))
    with pytest.raises(ValueError, match="more than one parameter group"):
        twice(model_parameters=[{"params": trained(module)}, {"params": trained(module)[:1]}])
