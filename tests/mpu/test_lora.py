"""Adapters beside one layer: what they add, how they start, and what their dropout does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megazero.config.schema import LoraConfig, ModelConfig
from megazero.mpu.grid import single_rank_group
from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megazero.mpu.lora import LowRank, freeze_all_but_adapters, low_rank
from megazero.mpu.parameter import spec_of
from megazero.mpu.random import DropoutKey, initialise, sliced_dropout

SAMPLES = torch.tensor([5, 9])


def layer(
    kind: type[ColumnParallelLinear | RowParallelLinear], lora: LowRank | None
) -> ColumnParallelLinear | RowParallelLinear:
    placed: dict[str, Any] = {"sequence_parallel": False, "dtype": torch.float64, "device": "cpu"}
    made = kind("blocks.0.mlp.up", 12, 20, single_rank_group(), bias=True, std=0.3, lora=lora, **placed)
    for parameter in made.parameters():
        initialise(parameter, spec_of(parameter), 3)
    return made


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_an_adapter_adds_its_product(kind: type[ColumnParallelLinear | RowParallelLinear]) -> None:
    plain, adapted = layer(kind, None), layer(kind, LowRank(4, 1.5, frozenset({"up"})))
    x = torch.randn(7, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert adapted.adapter is not None
    assert torch.equal(adapted(x, SAMPLES), plain(x)), "nothing changes at first"
    adapted.adapter.lora_b.data.normal_(generator=torch.Generator().manual_seed(2))
    expected = plain(x) + 1.5 * x @ adapted.adapter.lora_a.T @ adapted.adapter.lora_b.T
    torch.testing.assert_close(adapted(x, SAMPLES), expected, rtol=1e-13, atol=1e-13)
    freeze_all_but_adapters(adapted)
    adapted(x, SAMPLES).square().sum().backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert trained == {"adapter.lora_a", "adapter.lora_b"}
    assert layer(kind, LowRank(4, 1.5, frozenset({"down"}))).adapter is None


def test_a_starts_with_the_spread_that_peft_gives_it() -> None:
    made = ColumnParallelLinear(
        "blocks.0.attention.qkv",
        300,
        900,
        single_rank_group(),
        bias=False,
        std=0.3,
        lora=LowRank(64, 1.0, frozenset({"qkv"})),
        sequence_parallel=False,
        dtype=torch.float64,
        device="cpu",
    )
    assert made.adapter is not None
    for parameter in made.adapter.parameters():
        initialise(parameter, spec_of(parameter), 1)
    theirs = torch.nn.init.kaiming_uniform_(torch.empty(64, 300), a=math.sqrt(5))
    assert made.adapter.lora_a.std().item() == pytest.approx(theirs.std().item(), rel=0.03)
    assert not made.adapter.lora_b.any()


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_dropout_is_on_what_the_adapter_multiplies(kind: type[ColumnParallelLinear | RowParallelLinear]) -> None:
    """A that passes its input on and B that is one, so that the mask itself is seen."""
    made = layer(kind, LowRank(12, 1.0, frozenset({"up"}), dropout=0.25, seed=7, slices=3))
    assert made.adapter is not None
    made.weight.data.zero_()
    assert made.bias is not None
    made.bias.data.zero_()
    made.adapter.lora_a.data.copy_(torch.eye(12))
    made.adapter.lora_b.data.copy_(torch.eye(20, 12))
    x = torch.ones(500, 2, 12, dtype=torch.float64)
    seen = made(x, SAMPLES)[..., :12]
    assert set(seen.unique().tolist()) == {0.0, 1 / 0.75}
    assert (seen == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(seen, made(x, SAMPLES)[..., :12])
    assert torch.equal(seen[:, :1], made(x[:, :1], SAMPLES[:1])[..., :12]), "a sample's mask is its own"
    assert not torch.equal(seen[:, 0], seen[:, 1])
    made.eval()
    assert torch.equal(made(x)[..., :12], x)


def test_slices_of_a_mask_are_those_of_the_whole() -> None:
    x, key = torch.ones(9, 2, 30), DropoutKey(3, 0, "blocks.1.mlp.down")
    whole = sliced_dropout(x, 0.5, key, SAMPLES, 6, 0)
    for size in (1, 2, 3):
        width = 5 * size
        parts = [
            sliced_dropout(x[..., i * width : (i + 1) * width], 0.5, key, SAMPLES, size, i * size)
            for i in range(6 // size)
        ]
        assert torch.equal(torch.cat(parts, -1), whole)
    assert len({tuple(whole[0, 0, 5 * i : 5 * i + 5].tolist()) for i in range(6)}) > 3, "slices have masks of their own"


def test_any_allowed_tp_divides_the_slices() -> None:
    found = low_rank(
        LoraConfig(2), ModelConfig(num_attention_heads=24, num_query_groups=12, hidden_size=48, ffn_hidden_size=90)
    )
    assert found is not None and found.slices == 6
