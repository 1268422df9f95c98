"""Attention's constants, its two ways through, and what it keeps in memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fused_ops.attention.reference import reference_attention
from fused_ops.attention.sdpa import flash_attention
from megazero.config.derive import every_kth
from megazero.config.rotary import RotarySettings
from megazero.model.attention import Attention
from megazero.model.position import AlibiSlopes, RotaryAngles
from megazero.mpu.grid import Group
from tests.model.cases import BLOOM, LLAMA, PLAIN, batch_of, load, stage_of, weights_of


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16, 112])
def test_fault_23_slopes_are_those_of_the_global_number_of_heads(heads: int) -> None:
    like = torch.zeros(1, dtype=torch.float64)
    whole = AlibiSlopes(heads, 0, 1)(like)
    for size in (2, 3, 4):
        if heads % size == 0:
            assert torch.equal(whole, torch.cat([AlibiSlopes(heads, rank, size)(like) for rank in range(size)]))
    power = 2 ** int(math.log2(heads))
    expected = [2 ** (-8 * (i + 1) / power) for i in range(power)] + [
        2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)
    ]
    torch.testing.assert_close(whole, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)
    assert AlibiSlopes(heads, 0, 1)(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32


def test_rotary_tables_are_kept_and_exact() -> None:
    angles = RotaryAngles(6, RotarySettings(500.0))
    cos, sin = angles(torch.zeros(9, 1, 1, 6, dtype=torch.float64))
    again, _ = angles(torch.zeros(4, 1, 1, 6, dtype=torch.float64))
    assert again.data_ptr() == cos.data_ptr() and again.shape == (4, 1, 1, 3)
    assert cos[7, 0, 0, 2].item() == pytest.approx(math.cos(7 * 500.0 ** (-4 / 6)), rel=1e-14)
    assert sin[8, 0, 0, 1].item() == pytest.approx(math.sin(8 * 500.0 ** (-2 / 6)), rel=1e-14)
    with pytest.raises(ValueError, match="even head dimension"):
        RotaryAngles(5, RotarySettings(500.0))


@pytest.mark.parametrize("model", [LLAMA, PLAIN])
def test_both_ways_through_attention_agree(model: Any) -> None:
    """torch's own kernel, and scores and softmax in the open: the same context and gradients."""
    stage, batch = stage_of(model), batch_of(model)
    load(stage, weights_of(model))
    attention = stage.blocks["0"].attention
    assert isinstance(attention, Attention)
    generator = torch.Generator().manual_seed(0)
    groups, repeats, size = attention.groups, attention.repeats, attention.size
    mixed = torch.randn(
        12, 2, groups * (repeats + 2) * size, generator=generator, dtype=torch.float64, requires_grad=True
    )
    fused = flash_attention(mixed, groups, repeats, size, scale=0.3)
    scored = reference_attention(mixed, groups, repeats, size, scale=0.3, slopes=None, documents=batch.documents)
    torch.testing.assert_close(fused, scored, rtol=1e-12, atol=1e-13)
    weight = torch.randn(fused.shape, generator=generator, dtype=torch.float64)
    ours, others = (torch.autograd.grad((context * weight).sum(), mixed)[0] for context in (fused, scored))
    torch.testing.assert_close(ours, others, rtol=1e-11, atol=1e-12)


class Sizes(TorchDispatchMode):
    """Storages of at least `least` bytes that operations made."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.made = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self.least:
                self.made += tensor.untyped_storage().data_ptr() not in known
        return result


@pytest.mark.parametrize("documents", [False, True])
def test_alibi_makes_one_square_tensor(documents: bool) -> None:
    """Scores, and nothing else of [b, n, s, s]: no bias, no mask, no copy. In backward one more: the gradient."""
    length = 96
    model = replace(BLOOM, seq_length=length, hidden_dropout=0.0, attention_dropout=0.0, document_mask=documents)
    stage, batch = stage_of(model), batch_of(model, length=length)
    load(stage, weights_of(model))
    attention = stage.blocks["0"].attention
    assert isinstance(attention, Attention)
    hidden = torch.randn(length, 2, model.hidden_size, dtype=torch.float64, requires_grad=True)
    with Sizes(2 * model.num_attention_heads * length**2 * 8) as forward:
        output = attention(hidden, batch)
    assert forward.made == 1
    with Sizes(2 * model.num_attention_heads * length**2 * 8) as backward:
        output.sum().backward()
    assert backward.made == 1


def test_heads_that_tp_does_not_divide() -> None:
    with pytest.raises(ValueError, match="key-value heads"):
        stage_of(replace(LLAMA, num_query_groups=3), Group((0, 1), 0, None))


def test_selective_recompute_keeps_no_scores() -> None:
    """What autograd saves in the attention core is the query, key and value, not the probabilities."""
    length = 64
    saved = {}
    for kind in ("none", "selective"):
        model = replace(BLOOM, seq_length=length)
        stage, batch = stage_of(model, recompute=every_kth(model.num_layers, kind)), batch_of(model, length=length)
        load(stage, weights_of(model))
        square = 2 * model.num_attention_heads * length**2
        count: list[int] = []

        def keep(tensor: Tensor, square: int = square, count: list[int] = count) -> Tensor:
            count.append(tensor.numel() >= square)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stage.trunk(None, batch)
        saved[kind] = sum(count)
    assert saved["none"] > 0 and saved["selective"] == 0
