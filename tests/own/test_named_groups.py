"""Groups of parameters by patterns of their names, beside torch.optim with the same groups: loss, norm, weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megazero
from megazero.config.source import ConfigError
from tests.own import parallel_models
from tests.own.models import BETAS, CASES, DECAY, EPSILON, RATE, Case, Trained, plainly_trained
from tests.own.training import OF_ALL, RULE, model_of, require_equal, share_of, trained_with
from tests.ranks import run_ranks

STEPS = 6
Groups = Mapping[str, Mapping[str, Any]]
MLP: Groups = {
    "*.bias": {"weight_decay": 0.0, "lr_factor": 3.0},
    "1.gain": {"betas": (0.7, 0.8), "eps": 1e-3},
    "[03].*": {"weight_decay": 0.7, "lr_factor": 0.2, "betas": [0.5, 0.99]},
}
"""The biases of unit 0 and of all others are of the first; the module of unit 1 is that of unit 3."""
TIED: Groups = {"*.table.*": {"lr_factor": 0.1}, "*.attention.*": {"betas": (0.6, 0.7), "weight_decay": 0.0}}


def adamw(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY, **options}


def sgd(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"lr": RATE, "momentum": 0.8, "weight_decay": DECAY, **options}


def plainly(
    case: Case, groups: Groups, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, whole: Any = adamw
) -> Trained:
    """In plain torch. The first pattern that a name fits counts."""
    names = [name for name, each in nn.ModuleList(case.built()).named_parameters() if each.requires_grad]

    def make(trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        rest, of_torch = dict(zip(names, trained, strict=True)), list[dict[str, Any]]()
        for pattern, options in groups.items():
            # no fnmatch: the engine's patterns are held to what is read in another way
            expression = re.compile(
                re.escape(pattern).replace(r"\*", ".*").replace(r"\[", "[").replace(r"\]", "]") + "$"
            )
            fits = [rest.pop(name) for name in [*rest] if expression.match(name)]
            plain = {name: value for name, value in options.items() if name != "lr_factor"}
            of_torch.append({**whole(plain), "params": fits, "lr": RATE * options.get("lr_factor", 1.0)})
        return kind([*of_torch, {**whole({}), "params": [*rest.values()]}])

    return plainly_trained(replace(case, steps=STEPS), make)


EVERY: Mapping[str, tuple[Case, Groups]] = {
    "mlp": (CASES["mlp"], MLP),
    "tied ends": (CASES["tied ends"], {"0.*": {"lr_factor": 0.3, "weight_decay": 0.0}, "1.*": {"betas": (0.3, 0.6)}}),
    "tied": (parallel_models.CASES["tied"], TIED),
}
expected_of = cache(lambda name: plainly(*EVERY[name]))
LAYOUTS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("mlp", 1, {}),
    "small buckets": ("mlp", 2, {"zero_stage": 1, "bucket_size": 70}),
    "zero-2": ("mlp", 2, {"zero_stage": 2, "offload_gradients": "cpu"}),
    "zero-3": ("mlp", 4, {"zero_stage": 3, "late_update": True}),
    "host": ("mlp", 2, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}),
    "disks": ("mlp", 1, {"zero_stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme"}),
    "pp 2": ("mlp", 2, {"pp": 2, "late_update": True, "offload_optimizer": "cpu:0.5"}),
    "interleaved": ("mlp", 2, {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved"}),
    "tied over stages": ("tied ends", 3, {"pp": 3, "zero_stage": 1}),
    "hybrid": ("tied ends", 4, {"zero_stage": 3, "zero_shard_size": 2}),
    "tp 2": ("tied", 2, {"tp": 2}),
    "tp 2 x dp 2": ("tied", 4, {"tp": 2, "zero_stage": 3}),
}


def trained(rank: int, layout: str) -> Trained:
    name, _, fields = LAYOUTS[layout]
    case, groups = EVERY[name]
    return trained_with(replace(case, steps=STEPS), {**RULE, **fields}, groups=groups)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_train_as_those_of_torch(layout: str) -> None:
    name, size, _ = LAYOUTS[layout]
    for rank, made in enumerate(run_ranks(size, trained, layout)):
        require_equal(made, expected_of(name), f"{layout}, rank {rank}")


def test_groups_make_a_difference() -> None:
    """So that the comparison is of them: each line changes the weights."""
    case, groups = EVERY["mlp"]
    whole = expected_of("mlp").values
    for left_out in groups:
        less = plainly(case, {pattern: options for pattern, options in groups.items() if pattern != left_out}).values
        assert max((less[name] - value).abs().max().item() for name, value in whole.items()) > 1e-4, left_out


OTHERS: Mapping[str, tuple[Callable[..., Any], Callable[..., torch.optim.Optimizer], Any, Groups, dict[str, Any]]] = {
    "sgd of ours": (
        lambda: "sgd",
        torch.optim.SGD,
        sgd,
        {"*.bias": {"momentum": 0.3, "lr_factor": 2.0}, "*.gain": {"weight_decay": 0.5}},
        {"sgd_momentum": 0.8, "weight_decay": DECAY},
    ),
    "adamw of torch": (
        lambda: partial(torch.optim.AdamW, **adamw({})),
        torch.optim.AdamW,
        adamw,
        {"*.bias": {"betas": (0.5, 0.6), "lr_factor": 2.0}, "*.gain": {"weight_decay": 0.5}},
        {},
    ),
    "rmsprop of torch": (
        lambda: partial(torch.optim.RMSprop, lr=RATE, alpha=0.9),
        torch.optim.RMSprop,
        lambda options: {"lr": RATE, "alpha": 0.9, **options},
        {"*.bias": {"alpha": 0.5}, "*.gain": {"lr_factor": 0.1, "weight_decay": 0.5}},
        {},
    ),
}


def trained_by(rank: int, name: str) -> Trained:
    make, _, _, groups, fields = OTHERS[name]
    lr = RATE if name == "sgd of ours" else None
    layout = {**OF_ALL, **fields, "zero_stage": 3, "bucket_size": 70}
    return trained_with(replace(CASES["mlp"], steps=STEPS), layout, make(), lr, groups=groups)


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_have_groups(name: str) -> None:
    _, kind, whole, groups, _ = OTHERS[name]
    expected = plainly(CASES["mlp"], groups, kind, whole)
    for made in run_ranks(2, trained_by, name):
        require_equal(made, expected, name)


def halves(rank: int, number: int, folder: str) -> Trained:
    case, groups = EVERY["mlp"]
    fields: dict[str, Any] = ({"zero_stage": 3}, {"pp": 2, "offload_optimizer": "cpu"})[number]
    steps, load = range(3 * number, 3 * number + 3), folder if number else None
    return trained_with(case, {**RULE, **fields}, steps=steps, load=load, save=folder, groups=groups)


def test_groups_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    expected = expected_of("mlp")
    first, second = (run_ranks(2, halves, number, str(tmp_path))[0] for number in range(2))
    both = Trained([*first.numbers, *second.numbers], expected.evaluated, second.values)
    require_equal(both, expected, "over two layouts")


class Samples:
    """Of a case, one each."""

    def __len__(self) -> int:
        return STEPS * CASES["mlp"].micro_batches

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return CASES["mlp"].micro_batch(*divmod(at, CASES["mlp"].micro_batches))


def looped(rank: int, groups: Groups, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    case = CASES["mlp"]
    loop: dict[str, Any] = {
        "train_iters": STEPS,
        "micro_batch_size": 1,
        "global_batch_size": case.micro_batches,
        "lr": RATE,
    }
    loop |= {"lr_decay_style": "constant", **RULE, **fields}

    def joined(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return samples[0]

    with megazero.training(loop, model=model_of(case), data=Samples(), collate=joined, groups=groups) as run:
        for _ in run.steps():
            pass
        return dict(run.engine.state_dict())


def test_megazeros_loop_has_groups() -> None:
    case, groups = EVERY["mlp"]
    expected = plainly(case, groups).values
    for fields in ({"zero_stage": 1}, {"pp": 2, "late_update": True}):
        for values in run_ranks(2, looped, groups, fields):
            assert all((values[name] - value).abs().max() < 1e-9 for name, value in expected.items())


WRONG: Mapping[str, tuple[Any, str]] = {
    "no mapping": ([("*", {"eps": 1.0})], "groups is list: a mapping from patterns of names to options is needed"),
    "fits nothing": ({"*.wieght": {"eps": 1.0}}, "'*.wieght' fits the name of no parameter, such as 0.into.weight"),
    "frozen": ({"0.*": {"eps": 1.0}}, "'0.*' fits frozen parameters alone, such as 0.into.weight"),
    "behind": ({"*.bias": {"eps": 1.0}, "2.linear.bias": {"eps": 2.0}}, "fits parameters of earlier patterns alone"),
    "unknown": (
        {"*": {"decay": 0.1}},
        "'*' has decay; the optimizer's groups have lr_factor, weight_decay, betas, eps",
    ),
    "rate": ({"*": {"lr": 0.1}}, "the rate is that of the step, times lr_factor"),
    "momentum": ({"*": {"momentum": 0.1}}, "'*' has momentum; the optimizer's groups have"),
    "negative": ({"*": {"weight_decay": -0.1}}, "'*' has weight_decay -0.1: a number from 0 on is needed"),
    "no number": ({"*": {"lr_factor": float("nan")}}, "'*' has lr_factor nan: a number from 0 on is needed"),
    "bool": ({"*": {"eps": True}}, "'*' has eps True: a number above 0 is needed"),
    "one beta": ({"*": {"betas": 0.9}}, "'*' has betas 0.9: two numbers from 0 on, below 1 is needed"),
    "nothing": ({"*": {}}, "'*' has {}: a mapping from options to values is needed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_said(name: str) -> None:
    given, words = WRONG[name]
    with pytest.raises(ConfigError) as error:
        megazero.engine(model_of(CASES["frozen first"]), run=RULE, groups=given)
    assert words in str(error.value)


def test_a_shared_parameter_goes_by_its_first_name() -> None:
    with pytest.raises(ConfigError, match=r"'3\.\*' fits .* no parameter: 3\..* goes by its first name, 1\."):
        megazero.engine(model_of(CASES["mlp"]), run=RULE, groups={"3.*": {"eps": 1.0}})


def other_on_rank_1(rank: int) -> str:
    groups = {"*.bias": {"lr_factor": 1.0 + rank}}
    with pytest.raises(Exception) as error:
        megazero.engine(model_of(CASES["mlp"]), run=RULE, groups=groups)
    return str(error.value)


def test_ranks_have_the_same_groups() -> None:
    assert all("have other settings, or options of the optimizer" in told for told in run_ranks(2, other_on_rank_1))


def test_an_optimizer_of_torch_has_its_own_options() -> None:
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match=r"'\*' has betas; the optimizer's groups have lr_factor, momentum"):
        megazero.engine(model_of(CASES["mlp"]), make, run=OF_ALL, groups={"*": {"betas": (0.1, 0.2)}})


def test_groups_of_a_loop_are_of_models() -> None:
    with pytest.raises(ConfigError, match="groups is of a model of your own"), megazero.training({}, groups={}):
        pass


def test_a_step_of_an_engine_has_its_rate() -> None:
    """`lr=` of a step is that of the groups, too."""
    case = CASES["mlp"]
    with megazero.engine(model_of(case), "adamw", RATE, RULE, groups={"*.bias": {"lr_factor": 0.0}}) as engine:
        before = engine.state_dict()
        engine.step(share_of(engine, case, 0), lr=0.5)
        moved = {name: (value - before[name]).abs().max().item() for name, value in engine.state_dict().items()}
    assert all((step == 0.0) is name.endswith("bias") for name, step in moved.items())
    assert max(moved.values()) == pytest.approx(0.5, rel=0.2)
