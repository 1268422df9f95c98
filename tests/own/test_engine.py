"""A user's modules in every layout, beside plain torch with torch.optim: loss, norm, weights of ten steps in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import megazero
from tests.own.models import (
    BETAS,
    CASES,
    CLIP,
    DECAY,
    EPSILON,
    MICRO_BATCHES,
    RATE,
    STEPS,
    Case,
    Trained,
    plainly_trained,
)
from tests.ranks import run_ranks

EXACT = 1e-9
RULE = {
    "precision": "fp64",
    "weight_decay": DECAY,
    "clip_grad": CLIP,
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "adam_eps": EPSILON,
}
Layout = tuple[int, dict[str, Any]]
LAYOUTS: Mapping[str, Layout] = {
    "one": (1, {}),
    "recompute": (1, {"recompute_granularity": "full", "bucket_size": 60}),
    "host": (1, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu", "late_update": True}),
    "zero-1": (2, {"zero_stage": 1, "bucket_size": 100}),
    "zero-2": (2, {"zero_stage": 2, "recompute_granularity": "full", "offload_gradients": "cpu"}),
    "zero-3": (4, {"zero_stage": 3, "late_update": True}),
    "hybrid": (4, {"zero_stage": 3, "zero_shard_size": 2}),
    "pp 2": (2, {"pp": 2, "late_update": True}),
    "interleaved": (2, {"pp": 2, "virtual_stages": 2, "zero_stage": 1}),
    "zb-v": (2, {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "zb-v"}),
    "pp 2 x dp 2": (4, {"pp": 2, "zero_stage": 3, "recompute_granularity": "full"}),
    "disks": (1, {"zero_stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme"}),
    "disks, pp 2": (2, {"pp": 2, "offload_optimizer": "nvme:0.5", "zero_stage": 2, "late_update": True}),
    "pp 3": (3, {"pp": 3, "pipeline_schedule": "zb-h1", "offload_optimizer": "cpu:0.5"}),
}


def trained_on_rank(rank: int, name: str, layouts: list[dict[str, Any]]) -> list[Trained]:
    return [trained(CASES[name], layout) for layout in layouts]


def trained(case: Case, layout: Mapping[str, Any]) -> Trained:
    with TemporaryDirectory() as folder:
        disks = {"nvme_path": [folder]} if "nvme" in str(layout) else {}
        made = trained_with(case, {**layout, **disks})
        assert not any(Path(folder).iterdir()), "swap files are removed"
        return made


def trained_with(case: Case, layout: Mapping[str, Any]) -> Trained:
    model = megazero.Model(case.built(), case.loss, unused=case.unused)
    with megazero.engine(model, "adamw", RATE, {**RULE, **layout}) as engine:
        share = MICRO_BATCHES // engine.data_ranks
        own = range(engine.data_rank * share, (engine.data_rank + 1) * share)
        steps, evaluated = list[megazero.StepResult](), torch.tensor(0.0)
        for step in range(STEPS):
            steps.append(engine.step([case.micro_batch(step, number) for number in own]))
            # leaves no trace in the steps behind it
            evaluated = engine.evaluate([case.micro_batch(STEPS, number) for number in own])
        numbers = [(float(step.loss), float(step.grad_norm)) for step in steps]
        return Trained(numbers, float(evaluated), engine.state_dict())


plain = cache(plainly_trained)


@pytest.mark.parametrize("size", sorted({size for size, _ in LAYOUTS.values()}))
@pytest.mark.parametrize("name", CASES)
def test_every_layout_trains_as_plain_torch(name: str, size: int) -> None:
    layouts = {words: layout for words, (ranks, layout) in LAYOUTS.items() if ranks == size}
    if name == "tied ends":  # a parameter is on one stage, or on the first and the last
        layouts = {words: layout for words, layout in layouts.items() if "virtual_stages" not in layout}
    if name == "encoder and decoder" and size == 3:
        layouts = {words: {**layout, "partition": [4, 2, 1]} for words, layout in layouts.items()}
    if name == "convolutional":  # a unit that changes its input cannot be computed again
        layouts = {words: {**layout, "recompute_granularity": "none"} for words, layout in layouts.items()}
    expected = plain(CASES[name])
    for rank, made in enumerate(run_ranks(size, trained_on_rank, name, list(layouts.values()))):
        for words, own in zip(layouts, made, strict=True):
            where = f"{name}, {words}, rank {rank}"
            for step, (numbers, right) in enumerate(zip(own.numbers, expected.numbers, strict=True)):
                assert numbers == pytest.approx(right, rel=EXACT), f"{where}, step {step}"
            assert own.evaluated == pytest.approx(expected.evaluated, rel=EXACT), where
            assert {*own.values} == {*expected.values}, where
            for parameter, value in own.values.items():
                off = (value - expected.values[parameter]).abs().max().item()
                assert off < EXACT, f"{where}, {parameter}"


def evaluated_first(rank: int) -> list[float]:
    """The losses of an evaluation, and of two steps behind it."""
    case = CASES["mlp"]
    model = megazero.Model(case.built(), case.loss)
    batches = [case.micro_batch(0, number) for number in range(MICRO_BATCHES)]
    with megazero.engine(model, "adamw", RATE, {**RULE, "pp": 2}) as engine:
        return [float(engine.evaluate(batches)), *(float(engine.step(batches).loss) for _ in range(2))]


def test_an_evaluation_may_come_before_the_first_step() -> None:
    """It runs without a graph, and the messages of the steps behind it have gradients all the same."""
    for evaluated, first, second in run_ranks(2, evaluated_first):
        assert evaluated == pytest.approx(first, rel=1e-12) and second < first


def losses_of(precision: str, run: Mapping[str, Any]) -> list[float]:
    case, dtype = CASES["mlp"], {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]

    def batch(number: int) -> dict[str, torch.Tensor]:
        made = case.micro_batch(0, number)
        return {**made, "x": made["x"].to(dtype), "counts": torch.ones(3)}

    model = megazero.Model([unit.to(dtype) for unit in case.built()], case.loss)
    with megazero.engine(model, "adamw", RATE, run) as engine:
        assert next(iter(engine.state_dict().values())).dtype == dtype
        return [float(engine.step([batch(number) for number in range(2)]).loss) for _ in range(20)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_train_as_32_do(precision: str) -> None:
    expected = losses_of("fp32", {})
    found = losses_of(precision, {"zero_stage": 3, "recompute_granularity": "full"})
    assert expected[-1] < 0.2 * expected[0]
    assert found[0] == pytest.approx(expected[0], rel=0.02) and found[-1] < 0.25 * expected[0]
