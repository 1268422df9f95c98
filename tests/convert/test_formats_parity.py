"""Models of `transformers` taken through the formats of Megatron and DeepSpeed: the logits are still theirs, and so are
the tensors on the way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megazero
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source
from megazero.data.progress import silent
from tests.convert.hf_models import CASES, prompts, random_model, saved, their_answers

WAYS = {
    "llama, grouped": [
        ("megatron", TargetOptions(tp=2, pp=2)),
        ("universal", TargetOptions()),
        ("consolidated", TargetOptions()),
    ],
    "gpt2, inner width": [
        ("universal", TargetOptions()),
        ("megatron", TargetOptions(tp=4)),
        ("consolidated-safetensors", TargetOptions()),
    ],
    "bloom, 12 heads": [
        ("consolidated", TargetOptions()),
        ("megatron-deepspeed", TargetOptions(tp=4, pp=2)),
        ("universal", TargetOptions()),
    ],
}


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("name", WAYS)
def test_logits_survive_a_chain_of_formats(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folder = saved(case, tmp_path / "hf")
    expected, _ = their_answers(case, 1)
    for number, (kind, wanted) in enumerate(WAYS[name]):
        with open_source(folder) as source:
            convert(source, format_table()[kind], tmp_path / str(number), wanted, silent)
        folder = tmp_path / str(number)
        model = megazero.load(folder, precision="fp64")
        with torch.no_grad():
            logits = model(prompts())
        assert ((logits - expected).abs().max() / expected.abs().max()).item() < case.tolerance, kind


def test_tensors_are_those_of_megatrons_own_converter(tmp_path: Path) -> None:
    """tools/checkpoint/loader_llama_mistral.py there: query, key and value joined group by group, the gate on top of
    the other half.
    """
    case = CASES["llama, grouped"]
    with open_source(saved(case, tmp_path / "hf")) as source:
        convert(source, format_table()["megatron"], tmp_path / "out", TargetOptions(), silent)
    (file,) = (tmp_path / "out").rglob("model_optim_rng.pt")
    ours = torch.load(file, weights_only=False)["model"]
    theirs = random_model(case)
    groups, width = 4, 48 // 8
    for number, layer in enumerate(theirs.model.layers):
        attention, mlp, before = layer.self_attn, layer.mlp, f"decoder.layers.{number}"
        parts = [
            p.weight.reshape(groups, -1, width, 48).flatten(1, 2)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        assert torch.equal(ours[f"{before}.self_attention.linear_qkv.weight"], torch.cat(parts, dim=1).reshape(-1, 48))
        assert torch.equal(
            ours[f"{before}.mlp.linear_fc1.weight"], torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        )
        assert torch.equal(ours[f"{before}.mlp.linear_fc2.weight"], mlp.down_proj.weight)
        assert torch.equal(ours[f"{before}.self_attention.linear_proj.weight"], attention.o_proj.weight)
        assert torch.equal(ours[f"{before}.self_attention.linear_qkv.layer_norm_weight"], layer.input_layernorm.weight)
        assert torch.equal(ours[f"{before}.mlp.linear_fc1.layer_norm_weight"], layer.post_attention_layernorm.weight)
    assert torch.equal(ours["decoder.final_layernorm.weight"], theirs.model.norm.weight)
    assert torch.equal(ours["output_layer.weight"][:93], theirs.lm_head.weight)
