"""A loop of DeepSpeed's, with one import changed, beside plain torch: losses, norms and weights in fp64."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from megazero import deepspeed
from tests.deepspeed.models import (
    CASES,
    CLIP,
    MICRO_BATCHES,
    OPTIMIZER,
    SAMPLES,
    STEPS,
    Case,
    Plain,
    Trained,
    plainly_trained,
)
from tests.ranks import run_ranks

EXACT = 1e-9
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "sharded": (1, SHARDED),
    "stage 1": (2, {"stage": 1}),
    "stage 2": (2, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    "stage 3": (2, SHARDED),
    "stage 3, host": (2, {**SHARDED, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "stage 3, disks": (2, {**SHARDED, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}),
    "four ranks": (4, {"stage": 3}),
}


def config_of(zero: Mapping[str, Any], folder: str, ranks: int) -> dict[str, Any]:
    """A configuration. folder: for files of what goes to disks."""
    groups = {
        name: {**value, "nvme_path": folder} if isinstance(value, dict) and value["device"] == "nvme" else value
        for name, value in zero.items()
    }
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES // ranks,
        "optimizer": OPTIMIZER,
        "gradient_clipping": CLIP,
        "zero_optimization": groups,
    }


def steps_of(engine: deepspeed.DeepSpeedEngine, case: Case, steps: range) -> tuple[list[float], list[float]]:
    """(mean losses of this rank's micro-batches, norms) of steps."""
    losses, norms, here = list[float](), list[float](), engine.gradient_accumulation_steps()
    for step in steps:
        total = 0.0
        for number in range(engine.global_rank * here, (engine.global_rank + 1) * here):
            loss = engine(*case.micro_batch(step, number))
            engine.backward(loss)
            assert engine.is_gradient_accumulation_boundary() == (number == (engine.global_rank + 1) * here - 1)
            engine.step()
            total += loss.item() / here
        losses.append(total)
        norm = engine.get_global_grad_norm()
        assert norm is not None and engine.global_steps == step + 1
        norms.append(norm)
    return losses, norms


def evaluated(engine: deepspeed.DeepSpeedEngine, case: Case) -> float:
    engine.eval()
    loss = float(engine(*case.micro_batch(99, 0)))
    engine.train()
    return loss


def trained(case: Case, zero: Mapping[str, Any], ranks: int) -> Trained:
    with TemporaryDirectory() as folder:
        config = config_of(zero, folder, ranks)
        engine, _, _, _ = deepspeed.initialize(model=case.built(), config=config)
        losses, norms = steps_of(engine, case, range(STEPS))
        made = losses, norms, evaluated(engine, case), engine.module_state_dict()
        engine.destroy()
    return made


def trained_on_rank(rank: int, name: str, ranks: int) -> list[Trained]:
    return [trained(CASES[name], zero, ranks) for number, zero in LAYOUTS.values() if number == ranks]


@cache
def trained_by_ours(name: str, ranks: int) -> list[list[Trained]]:
    """By rank and layout."""
    if ranks == 1:
        return [trained_on_rank(0, name, 1)]
    return run_ranks(ranks, trained_on_rank, name, ranks)


@cache
def reference(name: str) -> Trained:
    return plainly_trained(CASES[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_loop_is_plain_torchs(name: str, layout: str) -> None:
    ranks = LAYOUTS[layout][0]
    place = [each for each, (number, _) in LAYOUTS.items() if number == ranks].index(layout)
    every = [of_rank[place] for of_rank in trained_by_ours(name, ranks)]
    losses, norms, loss, weights = reference(name)
    of_ranks = torch.tensor([of_rank[0] for of_rank in every], dtype=torch.float64)
    assert of_ranks.mean(0).tolist() == pytest.approx(losses, rel=EXACT)
    for _, own_norms, own_loss, own_weights in every:
        assert own_norms == pytest.approx(norms, rel=EXACT) and own_loss == pytest.approx(loss, rel=EXACT)
        assert own_weights.keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(own_weights[key], value, rtol=EXACT, atol=EXACT)
    assert abs(losses[-1] - losses[0]) > 1e-3


def resumed(rank: int, name: str, folder: str, ranks: int, zero: dict[str, Any], steps: range) -> Trained:
    case = CASES[name]
    with TemporaryDirectory() as disks:
        config = config_of(zero, disks, ranks)
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}
        engine, _, _, rates = deepspeed.initialize(model=case.built(), config={**config, "scheduler": schedule})
        assert rates is not None
        path, state = engine.load_checkpoint(folder)
        assert (path is not None, engine.global_steps) == (steps.start > 0, steps.start)
        assert state == ({"next": steps.start} if steps.start else {})
        assert engine.get_lr() == rates.get_last_lr() == [pytest.approx(0.02 * warmed(steps.start))]
        losses, norms = steps_of(engine, case, steps)
        engine.save_checkpoint(folder, client_state={"next": steps.stop})
        made = losses, norms, evaluated(engine, case), engine.module_state_dict()
        engine.destroy()
    return made


def warmed(step: int) -> float:
    """DeepSpeed's schedule begins one step late."""
    return min(max(step - 1, 0), 3) / 3


def scheduled(case: Case, steps: int) -> dict[str, torch.Tensor]:
    """The weights by plain torch, with the same schedule."""
    plain = Plain(case.built(), MICRO_BATCHES)
    rates = torch.optim.lr_scheduler.LambdaLR(plain.optimizer, warmed)
    for step in range(steps):
        plain.one_step(case, step)
        rates.step()
    return plain.module_state_dict()


def test_a_checkpoint_is_loaded_before_the_first_forward_on_any_layout(tmp_path: Path) -> None:
    """The order of the module's calls is not yet known then, and is not that of its definition."""
    folder, name = str(tmp_path), "perceptron"
    resumed(0, name, folder, 1, {"stage": 1}, range(2))
    run_ranks(2, resumed, name, folder, 2, SHARDED, range(2, 4))
    assert (tmp_path / "latest").read_text() == "global_step4"
    last = resumed(0, name, folder, 1, {**SHARDED, "offload_optimizer": {"device": "nvme"}}, range(4, 6))
    for key, value in scheduled(CASES[name], 6).items():
        torch.testing.assert_close(last[3][key], value, rtol=EXACT, atol=EXACT)


def test_an_optimizer_and_a_schedule_of_torch_are_taken(tmp_path: Path) -> None:
    """The schedule changes the rate in the program's optimizer, where the engine reads it."""
    case = CASES["recurrent"]

    def parts(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1, weight_decay=0.01)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    plain, module = case.built(), case.built()
    optimizer, rates = parts(plain)
    for step in range(3):
        optimizer.zero_grad()
        plain(*case.micro_batch(step, 0)).backward()
        optimizer.step()
        rates.step()
    mine, my_rates = parts(module)
    config = {"train_batch_size": SAMPLES, "zero_optimization": SHARDED, "gradient_clipping": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, same, _, same_rates = deepspeed.initialize(
            model=module, optimizer=mine, lr_scheduler=my_rates, config=config
        )
        assert same is mine and same_rates is my_rates and engine.gradient_accumulation_steps() == 1
        for step in range(3):
            engine.backward(engine(*case.micro_batch(step, 0)))
            engine.step()
    assert engine.get_lr() == [0.0125]
    for key, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=EXACT, atol=EXACT)
    engine.save_16bit_model(tmp_path)
    again = case.built()
    again.load_state_dict(torch.load(tmp_path / "pytorch_model.bin"))
    mine.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match=r"maximize of group 0 is True now, and was False"):
        engine.backward(engine(*case.micro_batch(3, 0)))
        engine.step()
    engine.destroy()


def test_a_dictionary_may_have_tuples() -> None:
    """As Python's do where JSON has lists."""
    params = {"lr": 1e-3, "betas": (0.7, 0.85)}
    schedule = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_momentum": False}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": params},
        "scheduler": schedule,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=torch.nn.Linear(3, 2), config=config)
    assert optimizer.param_groups[0]["betas"] == params["betas"]
    engine.destroy()
