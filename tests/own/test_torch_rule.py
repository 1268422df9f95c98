"""Optimizers of torch on ranges of a model state, beside themselves on whole parameters in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.config.source import ConfigError
from megazero.own.torch_rule import MakeOptimizer, TorchRule
from tests.own.models import CASES, CLIP, Trained, plainly_trained
from tests.own.training import LAYOUTS, OF_ALL, require_equal, trained_with
from tests.ranks import run_ranks

CASE = CASES["tuples"]


class Lion(torch.optim.Optimizer):
    """As packages write it (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                state = self.state[weights]
                average = state.setdefault("average", torch.zeros_like(weights))
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.sub_(group["lr"] * (0.9 * average + 0.1 * weights.grad).sign())
                average.lerp_(weights.grad, 0.01)


class Sgd(torch.optim.Optimizer):
    """Plain descent, with something more in a subclass."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "number": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                state = self.state[weights]
                state["step"] = state.get("step", 0) + 1
                weights.sub_(group["lr"] * self.direction(weights, weights.grad, state, group))

    def direction(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Elsewhere(Sgd):
    """Keeps the number of its steps where nobody finds it."""

    number = 0

    def direction(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        self.number += 1
        return gradient / self.number


class InGroup(Sgd):
    """Counts in its options, as Lookahead does in packages."""

    def direction(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        group["number"] += 1
        return gradient / group["number"]


class Late(Sgd):
    """Makes a state tensor in its fifth step."""

    def direction(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if state["step"] > 4:
            state["late"] = state.get("late", 0) + gradient
        return gradient


class ClipsLarge(Sgd):
    """Looks at the norm of a gradient, where that is large alone."""

    def direction(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient / max(1.0, float(gradient.norm()) / 300)


class Projects(Sgd):
    """Looks at the direction of a gradient, where that is orthogonal to the weights alone, as AdamP does."""

    def direction(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        along = torch.cosine_similarity(weights.view(1, -1), gradient.view(1, -1)).abs().item()
        return gradient * 0.5 if along < 1e-6 else gradient


class Large(Sgd):
    """Looks at the size of a parameter."""

    def direction(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient - gradient.mean() if weights.numel() > 1000 else gradient


def in_two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": parameters[:-1]}, {"params": parameters[-1:], "lr": 0.5}]
    return torch.optim.SGD(groups)


OPTIMIZERS: Mapping[str, tuple[MakeOptimizer, tuple[str, ...]]] = {
    "adamw": (partial(torch.optim.AdamW, lr=0.01, weight_decay=0.2), ("host", "zero-3", "pp 2")),
    "amsgrad": (partial(torch.optim.Adam, lr=0.02, amsgrad=True), ("disks", "interleaved", "zero-2")),
    "momentum": (partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.2), ("one", "zero-1", "disks, pp 2")),
    "nesterov": (partial(torch.optim.SGD, lr=0.05, momentum=0.8, nesterov=True), ("hybrid",)),
    "sgd": (partial(torch.optim.SGD, lr=0.05), ("host", "pp 2 x dp 2")),
    "adagrad": (partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1), ("zb-v", "zero-2", "hybrid")),
    "rmsprop": (partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5), ("disks, pp 2", "zero-3")),
    "lion": (partial(Lion, lr=0.01), ("recompute", "pp 3")),
}
"""What makes each, and its layouts."""


def trained(rank: int, name: str, layouts: list[dict[str, Any]]) -> list[Trained]:
    make, _ = OPTIMIZERS[name]
    return [trained_with(CASE, {**OF_ALL, **layout}, make, None) for layout in layouts]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_update_ranges_as_whole_parameters(name: str) -> None:
    make, layouts = OPTIMIZERS[name]
    expected = plainly_trained(CASE, make)
    assert expected.numbers[0][0] != pytest.approx(expected.numbers[-1][0], rel=1e-3), "it learns"
    for size in sorted({LAYOUTS[words][0] for words in layouts}):
        mine = [words for words in layouts if LAYOUTS[words][0] == size]
        for ranks in run_ranks(size, trained, name, [LAYOUTS[words][1] for words in mine]):
            for words, made in zip(mine, ranks, strict=True):
                require_equal(made, expected, words)


def stopped_and_resumed(rank: int, folder: str, name: str) -> Trained:
    """Four steps with ZeRO-2, and then the steps behind them with two stages."""
    make, _ = OPTIMIZERS[name]
    trained_with(CASE, {**OF_ALL, "zero_stage": 2}, make, None, steps=range(4), save=folder)
    run = {**OF_ALL, "pp": 2, "offload_optimizer": "cpu"}
    return trained_with(CASE, run, make, None, steps=range(4, CASE.steps), load=folder)


@pytest.mark.parametrize("name", ["amsgrad", "momentum", "adagrad"])
def test_a_resume_on_another_layout_goes_on(name: str, tmp_path: Path) -> None:
    expected = plainly_trained(CASE, OPTIMIZERS[name][0])
    for made in run_ranks(2, stopped_and_resumed, str(tmp_path), name):
        require_equal(made, expected, name, since=4)


def in_bf16(optimizer: Any, lr: float | None = None) -> dict[str, torch.Tensor]:
    run = {"precision": "bf16", "clip_grad": CLIP, "zero_stage": 1}
    run |= {} if lr is None else {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.999}
    model = megazero.Model(CASES["mlp"].built(), CASES["mlp"].loss)
    with megazero.engine(model, optimizer, lr, run) as engine:
        for step in range(4):
            batch = CASES["mlp"].micro_batch(step, 0)
            engine.step({name: value.bfloat16() for name, value in batch.items()})
        return engine.state_dict()


def test_weights_of_16_bits_have_masters_of_32() -> None:
    """As our own AdamW with the same options, up to where fp32 rounds."""
    theirs, ours = in_bf16(partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)), in_bf16("adamw", 0.01)
    for name, value in theirs.items():
        assert value.dtype == torch.bfloat16
        assert torch.allclose(value.float(), ours[name].float(), rtol=2**-7, atol=1e-4), name


def test_a_step_sets_its_learning_rate() -> None:
    made = dict[float, torch.Tensor]()
    for lr in (0.5, 0.25):
        model = megazero.Model([nn.Linear(3, 1, bias=False)], lambda y: (y.sum(), 1), input="x")
        with torch.no_grad():
            model.units[0].module.weight.fill_(1.0)
        with megazero.engine(model, torch.optim.SGD, run={"precision": "fp32", "clip_grad": 0.0}) as engine:
            assert engine.lr == 1e-3, "that of the optimizer"
            engine.step({"x": torch.tensor([[1.0, 2.0, 4.0]])}, lr=lr)
            made[lr] = engine.state_dict()["0.weight"]
    assert made[0.5].tolist() == [[0.5, 0.0, -1.0]]
    assert made[0.25].tolist() == [[0.75, 0.5, 0.0]]


REFUSED: Mapping[str, tuple[Any, str]] = {
    "a factored moment": (torch.optim.Adafactor, "Adafactor .* its update of an element depends on other elements"),
    "a product of matrices": (torch.optim.Muon, "makes no optimizer of a list of parameters: Muon only supports 2D"),
    "a closure": (torch.optim.LBFGS, "LBFGS .* it makes no step of parameters with dense gradients: .*closure"),
    "another number": (torch.optim.NAdam, "NAdam .* it keeps mu_product of a parameter, which is neither"),
    "something elsewhere": (Elsewhere, "Elsewhere .* it keeps something elsewhere than in the state"),
    "changed options": (InGroup, "InGroup .* its steps change the options of its group"),
    "a late state": (Late, "Late .* it keeps late of a parameter in some steps: step 1 is not as others"),
    "a norm of large ones": (ClipsLarge, "ClipsLarge .* depends on other elements"),
    "a direction": (Projects, "Projects .* depends on other elements"),
    "a size": (Large, "Large .* depends on other elements"),
    "two groups": (in_two_groups, "SGD .* it makes 2 groups of parameters"),
    "an optimizer": (torch.optim.SGD([nn.Parameter(torch.ones(2))]), "is a SGD: .*functools.partial"),
    "no optimizer": (lambda parameters: nn.ReLU(), "makes a ReLU: a torch.optim.Optimizer is needed"),
    "nothing": (None, "optimizer is a NoneType: the name of one of ours is needed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranges_cannot_have_is_refused_with_the_reason(name: str) -> None:
    make, told = REFUSED[name]
    with pytest.raises(ConfigError, match=told):
        TorchRule(make)


def test_options_in_two_places_are_refused() -> None:
    model = megazero.Model([nn.Linear(3, 1)], lambda y: (y.sum(), 1), input="x")
    with pytest.raises(ConfigError, match="run has adam_beta1, weight_decay: SGD of torch has options of its own"):
        megazero.engine(model, torch.optim.SGD, run={"weight_decay": 0.1, "adam_beta1": 0.8})


def test_a_checkpoint_of_another_optimizer_is_named(tmp_path: Path) -> None:
    for make, told in (
        (torch.optim.AdamW, None),
        ("adam", None),
        (torch.optim.Adagrad, "has exp_avg, exp_avg_sq .*sum"),
    ):
        model = megazero.Model(CASES["mlp"].built(), CASES["mlp"].loss)
        with megazero.engine(model, make, run={"precision": "fp64"}) as engine:
            if told is not None:
                with pytest.raises(ValueError, match=told):
                    engine.load(tmp_path)
                continue
            engine.load(tmp_path)  # AdamW's opens as our own Adam's
            assert engine.steps == (1 if make == "adam" else 0)
            engine.step(CASES["mlp"].micro_batch(0, 0))
            if make != "adam":
                engine.save(tmp_path)
