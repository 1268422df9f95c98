"""Adapters that PEFT puts into a user's modules by the names of linears, beside frozen weights in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import peft
import pytest
import torch
from torch import nn

import megazero
from tests.own.models import CASES, Case, Trained, mlp, plainly_trained, squared
from tests.own.training import RULE, require_equal, trained_with
from tests.ranks import run_ranks

LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"recompute_granularity": "full"}),
    "stages": (2, {"pp": 2, "zero_stage": 1}),
    "sharded": (4, {"pp": 2, "zero_stage": 3, "late_update": True}),
    "off the device": (1, {"zero_stage": 3, "offload_params": "nvme", "offload_optimizer": "cpu"}),
}


def with_adapters() -> list[nn.Module]:
    """A model with a module that is used twice. Its adapters have a dropout, and begin with numbers other than zero."""
    tree = nn.ModuleList(mlp())
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["linear", "into"], lora_dropout=0.2, use_rslora=True)
    config.init_lora_weights = False
    return list(peft.inject_adapter_in_model(config, tree))


ADAPTED = Case(with_adapters, squared, CASES["mlp"].batch)


def trained(rank: int, layout: str) -> Trained:
    return trained_with(ADAPTED, {**RULE, **LAYOUTS[layout][1]})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_train_as_in_plain_torch(layout: str) -> None:
    expected = plainly_trained(ADAPTED)
    for rank, made in enumerate(run_ranks(LAYOUTS[layout][0], trained, layout)):
        require_equal(made, expected, f"{layout}, rank {rank}")


def test_only_adapters_have_state_and_change() -> None:
    tree = nn.ModuleList(ADAPTED.built())
    begun, numbers = tree.state_dict(), sum(each.numel() for each in tree.parameters() if each.requires_grad)
    with megazero.engine(megazero.Model(ADAPTED.built(), squared), lr=0.01, run=RULE) as engine:
        engine.step([ADAPTED.micro_batch(0, number) for number in range(4)])
        values, buckets = engine.state_dict(), engine.state.shape.buckets
    changed = {name for name, value in values.items() if not torch.equal(value, begun[name])}
    assert changed == {name for name in begun if "lora_" in name}
    assert sum(bucket.gradient_bytes for bucket in buckets) == 8 * numbers
