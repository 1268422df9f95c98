"""Heads of sizes that kernels fill up to whole vectors and tiles (14, 72, 80, 96): the loss and every gradient are
those of `transformers` in float64 with each body of attention, and files have the size without what fills it up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from fused_ops.attention.selection import AttentionSupport
from fused_ops.native import library
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source
from megazero.convert.stages import fill_stages
from megazero.data.progress import silent
from megazero.model.batch import MicroBatch
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, whole_model
from megazero.mpu.grid import single_rank_group
from tests.convert.hf_models import CASES, Case, in_double, prompts, saved
from tests.parameters import assemble, gradients_of, worst_difference
from tests.parity.float64 import in_float64
from tests.parity.test_families import in_our_names

SIZES = (14, 72, 80, 96)
BODIES = {
    "kernel": ("auto", torch.float32, 1e-5),
    "softmax": ("softmax", torch.float32, 1e-5),
    "flash": ("flash", torch.float64, 1e-11),
}
"""Name -> --attention, dtype, the largest difference."""


def case_of(size: int, name: str = "qwen 3") -> Case:
    """Two groups of two heads, which are wider together than the residual stream. Qwen 3 has norms of their queries and
    keys.
    """
    shape = {"hidden_size": 36, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return replace(CASES[name], config={**CASES[name].config, **shape, "head_dim": size})


def batch_of() -> MicroBatch:
    ids = torch.cat([prompts()] * 4, dim=1)  # 36 tokens: more than a block of rows
    return MicroBatch(ids[:, :-1], ids[:, 1:], None, torch.arange(len(ids)))


def theirs_of(case: Case) -> tuple[float, Any]:
    """The loss, and the model with its gradients."""
    model, batch = in_double(case), batch_of()
    with in_float64():
        logits = model(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        loss.backward()
    return loss.item(), model


@pytest.mark.parametrize("size", SIZES)
def test_loss_and_gradients_equal_transformers(size: int, tmp_path: Path) -> None:
    if library.torch_library("auto") is None:
        pytest.skip("no compiler, no kernels")
    case, batch = case_of(size), batch_of()
    loss, theirs = theirs_of(case)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    with open_source(saved(case, tmp_path / "model")) as source:
        for body, (asked, dtype, most) in BODIES.items():
            support = AttentionSupport(asked=asked)
            layout = ModelLayout(source.model, single_rank_group(), dtype, attention=support)
            stage = Stage(layout, whole_model(source.model))
            fill_stages([stage], source)
            ours = stage(None, batch)
            ours.backward()
            assert abs(ours.item() / loss - 1) < most, body
            mine = {name: tensor.double() for name, tensor in assemble([gradients_of(stage)]).items()}
            apart, name = worst_difference(mine, in_our_names(case.kind, source.model, gradients, list(mine)))
            assert apart < most, (body, name)


@pytest.mark.parametrize("size", SIZES)
def test_files_have_the_size_alone(size: int, tmp_path: Path) -> None:
    """Also of Megatron-LM, which has no norms of queries and keys."""
    theirs = saved(case_of(size, "mistral nemo"), tmp_path / "theirs")
    written = {}
    for path, format in (("native", "megazero"), ("megatron", "megatron"), ("mine", "hf")):
        with open_source(theirs if path == "native" else tmp_path / "native") as source:
            assert source.entries["blocks.1.attention.qkv.weight"].shape == (8 * size, 36)
            convert(source, format_table()[format], tmp_path / path, TargetOptions(), silent)
    for folder in (theirs, tmp_path / "mine"):
        assert json.loads((folder / "config.json").read_text())["head_dim"] == size
        with safe_open(folder / "model.safetensors", "pt") as file:
            written[folder] = {key: file.get_tensor(key) for key in sorted(file.keys())}
    mine, expected = written.values()
    assert mine.keys() == expected.keys() and all(torch.equal(mine[key], expected[key]) for key in mine)
    assert mine["model.layers.1.self_attn.k_proj.weight"].shape == (2 * size, 36)
    with open_source(tmp_path / "megatron") as source, open_source(theirs) as first:
        assert source.model.kv_channels == size
        assert all(torch.equal(source.read(name), first.read(name)) for name in first.entries)
