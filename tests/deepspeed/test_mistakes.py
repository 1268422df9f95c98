"""Mistakes in a loop for DeepSpeed: each is one error that says what to do, and names the unit or the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero import deepspeed
from megazero.config.source import ConfigError
from tests.deepspeed.models import CASES, OPTIMIZER, SAMPLES
from tests.ranks import run_ranks

Engine = deepspeed.DeepSpeedEngine
CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "gradient_accumulation_steps": 2,
    "optimizer": OPTIMIZER,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}},
}
CASE = CASES["perceptron"]


def engine_of(module: nn.Module, **changed: Any) -> Engine:
    return deepspeed.initialize(model=module, config={**CONFIG, **changed})[0]


class Reversing(nn.Module):
    """Layers whose order changes with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, numbers: Tensor) -> Tensor:
        for layer in self.layers if numbers[0, 0] > 0 else reversed(self.layers):
            numbers = layer(numbers)
        return numbers.square().mean()


class Together(Reversing):
    """Two layers that torch computes again at once."""

    def forward(self, numbers: Tensor) -> Tensor:
        both = nn.Sequential(*self.layers[1:])
        hidden: Tensor = checkpoint(both, self.layers[0](numbers), use_reentrant=False)
        return hidden.square().mean()


def of_order(sign: float) -> None:
    engine = engine_of(Reversing().double())
    for factor in (1.0, sign):
        engine.backward(engine(factor * torch.ones(2, 4, dtype=torch.float64)))
        engine.step()


def of_loop(engine: Engine, loop: Callable[[Engine, Tensor], Any]) -> None:
    loop(engine, engine(*CASE.micro_batch(0, 0)))


def in_mid_step(engine: Engine, loss: Tensor) -> None:
    engine.backward(loss)
    engine.eval()(*CASE.micro_batch(0, 1))


def one_more(engine: Engine, loss: Tensor) -> None:
    engine.backward(loss)
    engine.backward(engine(*CASE.micro_batch(0, 1)))
    engine(*CASE.micro_batch(0, 2))


def frozen_behind_a_step(engine: Engine, loss: Tensor) -> None:
    engine.backward(loss)
    engine.backward(engine(*CASE.micro_batch(0, 1)))
    engine.step()
    engine.module.get_parameter("first.weight").requires_grad_(False)
    engine(*CASE.micro_batch(1, 0))


def with_a_parameter_outside(engine: Engine, loss: Tensor) -> None:
    module = CASE.built()
    old = module.get_parameter("first.weight")
    other = engine_of(module)
    other.backward(other(*CASE.micro_batch(0, 0)) + old.square().sum())


LOOPS: Mapping[str, tuple[Callable[[Engine, Tensor], Any], str]] = {
    "forward twice": (lambda engine, loss: engine(*CASE.micro_batch(0, 1)), "called again before the backward"),
    "no backward": (lambda engine, loss: engine.step(), "step without a backward"),
    "in mid-step": (in_mid_step, "an evaluation in the middle of a step, behind 1 of its 2 micro-batches"),
    "one more": (one_more, "a step has 2 micro-batches, and here is another"),
    "many losses": (lambda engine, loss: engine.backward(loss.expand(3)), "backward takes the loss"),
    "a parameter outside": (with_a_parameter_outside, r"parameter first\.weight is not here"),
    "state": (lambda engine, loss: engine.save_checkpoint("x", client_state={"a": loss}), "what JSON does not hold"),
    "frozen now": (frozen_behind_a_step, r"requires_grad of first\.weight is False now"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_wrong_loop(name: str) -> None:
    loop, words = LOOPS[name]
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
        of_loop(engine_of(CASE.built()), loop)


def test_an_order_that_changes_names_the_unit() -> None:
    of_order(2.0)
    with pytest.raises(RuntimeError, match=r"unit 'layers\.1' of the module is computed behind 'layers\.2'"):
        of_order(-1.0)


def test_several_units_in_one_checkpoint_need_whole_parameters() -> None:
    numbers = torch.ones(2, 4, dtype=torch.float64)
    whole = engine_of(Together().double(), zero_optimization={"stage": 2})
    whole.backward(whole(numbers))
    sharded = engine_of(Together().double())
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint has one unit at a time"):
        sharded.backward(sharded(numbers))


def first_calls(rank: int) -> list[str]:
    """What a call says of a model that differs between ranks, and of statistics that would."""
    told = list[str]()
    torch.manual_seed(rank)
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for module in (nn.Sequential(nn.Linear(4, 4)), normed):
        if module is normed:
            for parameter in module.parameters():
                nn.init.constant_(parameter, 0.5)
        try:
            engine_of(module, gradient_accumulation_steps=1)(torch.ones(3, 4))
        except Exception as error:
            told.append(str(error))
    return told


def test_ranks_that_differ() -> None:
    for told in run_ranks(2, first_calls):
        assert "begin with other values: seed torch alike" in told[0]
        assert "unit '1' changes its buffer" in told[1]


BEFORE = "save_checkpoint comes before the first forward"
CONFIGURATIONS: Mapping[str, tuple[dict[str, Any], str]] = {
    "key": ({"zero_optimisation": {"stage": 1}}, "there is no zero_optimisation.stage; did you mean zero_optimization"),
    "of a run": ({"tensorboard": {"enabled": True, "output_path": "logs"}}, "a module of one's own reads none"),
    "sizes": (
        {"train_batch_size": 7},
        "train_batch_size 7 is not train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 2 x 1 ranks",
    ),
    "no size": ({"train_micro_batch_size_per_gpu": "auto"}, "train_batch_size or train_micro_batch_size_per_gpu is"),
    "a size of none": ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu"),
    "schedule": ({"scheduler": {"type": "Cycles"}}, "scheduler.type 'Cycles' is not built; valid: WarmupLR"),
    "key of a schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        "there is no scheduler.params.warmup_steps of WarmupLR",
    ),
    "no length": ({"scheduler": {"type": "WarmupDecayLR"}}, "WarmupDecayLR needs scheduler.params.total_num_steps"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_wrong_configuration(name: str) -> None:
    changed, words = CONFIGURATIONS[name]
    with pytest.raises(ConfigError, match=words):
        engine_of(CASE.built(), **changed)


class Scaled(torch.optim.SGD):
    """With an option that no one can read."""

    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params, lr=0.1 * scale)


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_wrong_arguments() -> None:
    module = CASE.built()
    every = [*module.parameters()]
    two: list[dict[str, Any]] = [{"params": every[:1], "momentum": 0.9}, {"params": every[1:]}]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": None}, "needs model="),
        ({"config": None}, "needs config="),
        ({"config": {"train_batch_size": 4}}, "there is no optimizer"),
        (
            {"optimizer": torch.optim.SGD(two)},
            "of one group of parameters it keeps momentum_buffer, and of another not",
        ),
        ({"optimizer": lambda parameters: parameters}, "optimizer makes a list"),
        ({"model_parameters": every[1:]}, "the optimizer does not have .* parameters that"),
        ({"model_parameters": [{"params": every, "amsgrad": True}]}, "group 0 of parameters has amsgrad; adamw has lr"),
        ({"optimizer": 3}, "optimizer is int"),
        ({"optimizer": torch.optim.SGD([*module.parameters()][1:])}, "the optimizer does not have .* parameters that"),
        ({"optimizer": torch.optim.SGD([*module.parameters(), nn.Parameter(torch.ones(2))])}, "none of the module's"),
        ({"optimizer": stepped(module)}, "SGD has made steps already"),
        ({"optimizer": Scaled(module.parameters(), 5.0)}, "Scaled does not say with which scale it was made"),
    ]
    for given, words in wrong:
        with pytest.raises(ValueError, match=words):
            deepspeed.initialize(**{"model": module, "config": CONFIG, **given})
    with pytest.raises(RuntimeError, match=BEFORE):
        engine_of(module).save_checkpoint("folder")
