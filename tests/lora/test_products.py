"""The products of a step are those of the formula: no frozen weight has a gradient made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megazero.config.derive import ffn_width, head_dim, query_groups
from megazero.config.schema import LoraConfig, ModelConfig
from megazero.convert.source import parameter_specs
from megazero.model.batch import MicroBatch
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, initialise, whole_model
from megazero.mpu.grid import single_rank_group
from megazero.mpu.lora import low_rank
from megazero.mpu.parameter import spec_of
from megazero.plan.flops import adapter_flops, model_flops

SHAPE = ModelConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=6,
    num_query_groups=2,
    activation="swiglu",
    vocab_size=60,
    seq_length=16,
)
MODEL = replace(SHAPE, make_vocab_size_divisible_by=1)
CHANGES = {
    "all layers": LoraConfig(3),
    "the last of a block": LoraConfig(5, lora_targets=("down",)),
    "none": LoraConfig(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_products_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")  # what a kernel multiplies is not seen
    lora = CHANGES[name]
    stage = Stage(
        ModelLayout(MODEL, single_rank_group(), torch.float64, lora=low_rank(lora, MODEL)), whole_model(MODEL)
    )
    initialise(stage, 1)
    ids = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter:
        stage(None, MicroBatch(ids, ids, None, torch.arange(2))).backward()
    adapters = parameter_specs(MODEL, adapters=lora).values() if lora.lora_rank else ()
    trained = sum(spec.shape[0] * spec.shape[1] for spec in adapters)
    expected = adapter_flops(MODEL, 2, trained) if lora.lora_rank else model_flops(MODEL, 2)
    assert counter.get_total_flops() == expected - 2 * not_needed(lora, MODEL.seq_length)
    assert all(
        (parameter.grad is None) == (lora.lora_rank is not None and ".lora_" not in spec_of(parameter).name)
        for parameter in stage.parameters()
    )


def not_needed(lora: LoraConfig, rows: int) -> int:
    """Operations on one sample before the first adapter, where gradients of inputs have no use."""
    hidden, width = MODEL.hidden_size, ffn_width(MODEL)
    qkv = hidden * (hidden + 2 * query_groups(MODEL) * head_dim(MODEL))
    if lora.lora_rank is None:
        return 0
    if not lora.lora_targets:  # the first is beside query, key and value
        return 2 * rows * (qkv + hidden * lora.lora_rank)
    attention = 2 * 4 * rows * rows * hidden
    return 2 * rows * (qkv + hidden * hidden + 2 * hidden * width + width * hidden + width * lora.lora_rank) + attention
