"""A case trained by an engine in a layout, and its comparison with the same training in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import megazero
from megazero.own.torch_rule import MakeOptimizer
from tests.own.models import BETAS, CLIP, DECAY, EPSILON, RATE, Batch, Case, Trained

EXACT = 1e-9
OF_ALL = {"precision": "fp64", "clip_grad": CLIP}
"""What a run has beside any optimizer."""
RULE = {**OF_ALL, "weight_decay": DECAY, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPSILON}
"""What a run has beside our own AdamW."""
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


def model_of(case: Case) -> megazero.Model:
    return megazero.Model(case.built(), case.loss, unused=case.unused)


def share_of(engine: megazero.Engine, case: Case, step: int) -> list[Batch]:
    """This rank's micro-batches of a step."""
    share = case.micro_batches // engine.data_ranks
    own = range(engine.data_rank * share, (engine.data_rank + 1) * share)
    return [case.micro_batch(step, number) for number in own]


def trained_with(
    case: Case,
    run: Mapping[str, Any],
    optimizer: str | MakeOptimizer = "adamw",
    lr: float | None = RATE,
    *,
    model: megazero.Model | None = None,
    steps: range | None = None,
    load: str | None = None,
    save: str | None = None,
    evaluates_each: bool = False,
    timed: Batch | None = None,
    example: Sequence[Batch] | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> Trained:
    """What this rank's engine makes of a case.

    run             fields of the run. Each rank has a folder of its own for swap files, which are gone at the end
    model           default: the units of the case
    steps           default: those of the case
    load, save      folders with checkpoints, in front of these steps and behind them
    evaluates_each  whether there is an evaluation behind each step, of which the steps have no trace, and not behind
                    the last one alone
    timed, example, groups
                    as of an engine
    """
    steps = range(case.steps) if steps is None else steps
    made, evaluated = list[megazero.StepResult](), torch.tensor(0.0)
    with TemporaryDirectory() as folder:
        disks = {"nvme_path": [folder]} if "nvme" in str(run) else {}
        fields, measured = {**run, **disks}, {"timed": timed, "example": example, "groups": groups}
        with megazero.engine(model or model_of(case), optimizer, lr, fields, **measured) as engine:
            if load is not None:
                assert engine.load(load) is not None and engine.steps == steps.start
            for step in steps:
                made.append(engine.step(share_of(engine, case, step)))
                if evaluates_each or step == steps[-1]:
                    evaluated = engine.evaluate(share_of(engine, case, case.steps))
            if save is not None:
                engine.save(save)
            numbers = [(float(step.loss), float(step.grad_norm)) for step in made]
            trained = Trained(numbers, float(evaluated), engine.state_dict())
        assert not any(Path(folder).iterdir()), "swap files are removed"
    return trained


def require_equal(made: Trained, expected: Trained, words: str, since: int = 0) -> None:
    """Hold a training to another. since: the first step of `made`. words: which training it is."""
    for step, (numbers, right) in enumerate(zip(made.numbers, expected.numbers[since:], strict=True), since):
        assert numbers == pytest.approx(right, rel=EXACT), f"{words}, step {step}: {numbers} is not {right}"
    both = f"{made.evaluated} is not {expected.evaluated}"
    assert made.evaluated == pytest.approx(expected.evaluated, rel=EXACT), f"{words}, evaluation: {both}"
    assert {*made.values} == {*expected.values}, f"{words}: {sorted({*made.values} ^ {*expected.values})}"
    for name, value in made.values.items():
        off = (value - expected.values[name]).abs().max().item()
        assert off < EXACT, f"{words}, {name}: it is off by {off}"
