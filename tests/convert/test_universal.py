"""Universal checkpoints and consolidated weights: written ones are read back here, and those of DeepSpeed's own
converter too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megazero.config.schema import ModelConfig
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source, recognise
from megazero.convert.source import ConversionError, Source
from megazero.data.progress import silent
from tests.convert.sources import AS_LLAMA, made

BLOOM = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    ffn_hidden_size=96,
    vocab_size=97,
    make_vocab_size_divisible_by=8,
    seq_length=16,
    max_position_embeddings=16,
    embedding_layernorm=True,
)
LLAMA = replace(BLOOM, num_attention_heads=4, embedding_layernorm=False, ffn_hidden_size=20, **AS_LLAMA)
MODELS = {
    "bloom": BLOOM,
    "gpt": replace(BLOOM, position_embedding="learned", embedding_layernorm=False),
    "llama": LLAMA,
}
COLUMNS = ("weight", "exp_avg", "exp_avg_sq")


def same(opened: Source, source: Source, columns: tuple[str, ...] = COLUMNS) -> None:
    assert list(opened.entries) == list(source.entries) and opened.columns == columns
    for name, entry in opened.entries.items():
        for column in columns:
            found = opened.read(name, column)
            stored = found.dtype, tuple(found.shape)
            assert stored == (entry.columns[column], entry.shape) == (torch.float32, source.entries[name].shape)
            assert torch.equal(found, source.read(name, column)), (name, column)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_there_and_back(tmp_path, model):
    source = made(model, precision="bf16", moments=True)
    convert(source, format_table()["universal"], tmp_path / "out", TargetOptions(), silent)
    assert recognise(tmp_path / "out") == "universal"
    assert recognise(tmp_path / "out" / "global_step7_universal") == "universal"
    with open_source(tmp_path / "out") as opened:
        same(opened, source)
        assert opened.model == model
        assert opened.run.optimizer == source.run.optimizer
        assert opened.position == source.position


def test_a_loss_scale_goes_along(tmp_path):
    source = made(BLOOM, precision="fp16", moments=True)
    source.position = replace(source.position, loss_scale={"scale": 4096.0, "good_steps": 3, "overflows": 1})
    rules: dict[str, Any] = {"loss_scale_window": 50, "hysteresis": 3, "min_loss_scale": 8.0}
    source.run = replace(source.run, optimizer=replace(source.run.optimizer, **rules))
    convert(source, format_table()["universal"], tmp_path / "out", TargetOptions(), silent)
    with open_source(tmp_path / "out") as opened:
        assert opened.position == source.position and opened.run.optimizer.precision == "fp16"
        assert {name: getattr(opened.run.optimizer, name) for name in rules} == rules


def test_weights_alone(tmp_path):
    source = made(BLOOM)
    convert(source, format_table()["universal"], tmp_path / "out", TargetOptions(), silent)
    assert not list((tmp_path / "out").rglob("exp_avg*")) and not list((tmp_path / "out").rglob("step.pt"))
    with open_source(tmp_path / "out") as opened:
        same(opened, source, ("weight",))
        assert any("weights only" in note for note in opened.report.notes)


def test_the_names_are_blooms(tmp_path):
    convert(made(BLOOM, moments=True), format_table()["universal"], tmp_path / "out", TargetOptions(), silent)
    folder = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    names = {path.name for path in (folder / "zero").iterdir() if path.is_dir()}
    parts = ["input_layernorm", "post_attention_layernorm", "self_attention.query_key_value", "self_attention.dense"]
    parts += ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
    block = {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    tied = {f"tied_modules.embed.word_embeddings.{end}" for end in ("weight", "norm.weight", "norm.bias")}
    assert names == tied | {f"{layer}.{key}" for layer in (3, 4) for key in block} | {"6.weight", "6.bias"}
    word = torch.load(folder / "zero" / "tied_modules.embed.word_embeddings.weight" / "fp32.pt")
    assert word.keys() == {"param", "cat_dim", "vocab_tensor"} and word["param"].shape == (97, 24)
    assert torch.load(folder / "zero" / "3.mlp.dense_4h_to_h.weight" / "exp_avg.pt")["cat_dim"] == 1
    assert torch.load(folder / "zero" / "3.input_layernorm.bias" / "fp32.pt").keys() == {"param"}


def by_hand(
    folder: Path, source: Source, *, padding: int = 0, plain: bool = False, ranks: int = 1, **more: Any
) -> Path:
    """A universal checkpoint as older versions leave it: no flags but the axis, the vocabulary's padding kept, steps
    with the optimizer's groups.

    ranks: a gated layer's rows as tp ranks have them, one after the other.
    """
    model = source.model
    first, last = (3, model.num_layers + 4) if not plain else (0, 0)
    parts = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attention.query_key_value",
        "attention.output": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    inside = folder / "global_step7_universal"
    for name in source.entries:
        where, part, kind = name.split(".")[0], ".".join(name.split(".")[2:-1]), name.split(".")[-1]
        if where == "blocks":
            number = int(name.split(".")[1])
            if part == "mlp.gate":
                continue
            key = f"language_model.encoder.layers.{number}." if plain else f"{number + first}."
            key += f"{parts[part]}.{kind}"
        elif where == "embedding":
            key = "language_model.embedding." if plain else "tied_modules.embed."
            key += {"embedding.word.weight": "word_embeddings.weight"}.get(name) or f"word_embeddings.norm.{kind}"
        elif name == "head.weight":
            key = "language_model.output_layer.weight"
        else:
            key = f"language_model.encoder.final_layernorm.{kind}" if plain else f"{last}.{kind}"
        there = inside / "zero" / key
        there.mkdir(parents=True)
        for column, file in zip(COLUMNS, ("fp32", "exp_avg", "exp_avg_sq"), strict=True):
            value = source.read(name, column)
            if part == "mlp.up" and model.activation == "swiglu":
                gates = source.read(name.replace("mlp.up", "mlp.gate"), column).chunk(ranks)
                value = torch.cat([half for pair in zip(gates, value.chunk(ranks), strict=True) for half in pair])
            if name in ("embedding.word.weight", "head.weight"):
                value = torch.cat([value, torch.full((padding, value.shape[1]), 5.0)])
            by_columns = "dense.weight" in key or "4h_to_h.weight" in key
            torch.save({"param": value, "cat_dim": int(by_columns)}, there / f"{file}.pt")
    group = {"lr": 0.1, "betas": (0.9, 0.97), "eps": 1e-8, "step": 5, "weight_decay": 0.2}
    torch.save({"param_groups": [group], "clip_grad": 0.7}, inside / "zero" / "optimizer_state.pt")
    told = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "ffn_hidden_size")
    args: dict[str, Any] = {name: getattr(model, name) for name in told} | {"max_position_embeddings": 16, "bf16": True}
    args |= {"make_vocab_size_divisible_by": 8, "padded_vocab_size": 97 + padding, "tensor_model_parallel_size": ranks}
    torch.save({"args": argparse.Namespace(**args | more), "iteration": 7}, inside / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(inside.name + "\n")
    return inside


def test_blooms_own_kept_the_padding(tmp_path):
    source = made(BLOOM, moments=True)
    by_hand(tmp_path, source, padding=15, embed_layernorm=True, position_embedding_type=3)
    with open_source(tmp_path) as opened:
        assert opened.model == replace(BLOOM, vocab_size=112)
        assert opened.read("embedding.word.weight", "exp_avg")[97:].eq(5.0).all()
        assert opened.position.optimizer_steps == 5.0
        optimizer = opened.run.optimizer
        assert (optimizer.adam_beta2, optimizer.weight_decay, optimizer.clip_grad) == (0.97, 0.2, 0.7)
        assert optimizer.precision == "bf16"
    args = tmp_path / "global_step7_universal" / "mp_rank_00_model_states.pt"
    state = torch.load(args, weights_only=False)
    state["args"].vocab_size = 97
    torch.save(state, args)
    with open_source(tmp_path) as opened:
        same(opened, source)


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_of_the_model_without_a_pipeline_and_rows_of_two_ranks(tmp_path, ranks):
    source = made(LLAMA, moments=True)
    llama: dict[str, Any] = {"swiglu": True, "add_bias_linear": False, "normalization": "rmsnorm"}
    llama |= {"untie_embeddings_and_output_weights": True, "use_rotary_position_embeddings": True}
    by_hand(tmp_path, source, plain=True, ranks=ranks, num_key_value_heads=2, **llama)
    with open_source(tmp_path) as opened:
        same(opened, source)
        assert opened.model == LLAMA


def test_all_that_is_wrong_is_said(tmp_path):
    inside = by_hand(tmp_path, made(BLOOM, moments=True), embed_layernorm=True, position_embedding_type=3)
    torch.save({"param": torch.zeros(95, 24)}, inside / "zero" / "3.mlp.dense_h_to_4h.weight" / "fp32.pt")
    (inside / "zero" / "4.self_attention.dense.bias" / "fp32.pt").unlink()
    (inside / "zero" / "4.adapter.weight").mkdir()
    torch.save({"param": torch.zeros(3)}, inside / "zero" / "4.adapter.weight" / "fp32.pt")
    with pytest.raises(
        ConversionError,
        match=r"4\.adapter\.weight .*3\.mlp\.dense_h_to_4h\.weight has shape \[95, "
        r"24\].*blocks\.1\.attention\.output\.bias is missing",
    ):
        open_source(tmp_path)


def test_stage_three_leaves_flat_tensors(tmp_path):
    inside = by_hand(tmp_path, made(BLOOM, moments=True), embed_layernorm=True, position_embedding_type=3)
    torch.save(torch.zeros(24), inside / "zero" / "3.input_layernorm.bias" / "fp32.pt")
    with pytest.raises(ConversionError, match="flat tensor without a shape"):
        open_source(tmp_path)


@pytest.mark.parametrize("kind", ["consolidated", "consolidated-safetensors"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_state_dictionary(tmp_path, model, kind):
    source = made(model, precision="bf16", moments=True)
    convert(source, format_table()[kind], tmp_path / "out", TargetOptions(), silent)
    file = tmp_path / "out" / ("pytorch_model.bin" if kind == "consolidated" else "model.safetensors")
    state = torch.load(file) if kind == "consolidated" else load_file(file)
    assert torch.equal(state["3.self_attention.dense.weight"], source.read("blocks.0.attention.output.weight"))
    if model.activation == "swiglu":
        gated = [source.read(f"blocks.1.mlp.{part}.weight") for part in ("gate", "up")]
        assert torch.equal(state["4.mlp.dense_h_to_4h.weight"], torch.cat(gated))
    with open_source(tmp_path / "out") as opened:
        same(opened, source, ("weight",))
        assert opened.model == model and opened.run.optimizer == source.run.optimizer
        assert opened.position.iteration == 7


def test_what_zero_to_fp32_leaves_is_told_by_the_checkpoint_beside_it(tmp_path):
    """Several files under an index, the arguments in the checkpoint that `latest` names."""
    source = made(BLOOM)
    convert(source, format_table()["consolidated"], tmp_path / "out", TargetOptions(), silent)
    state = torch.load(tmp_path / "out" / "pytorch_model.bin")
    folder = tmp_path / "theirs"
    (folder / "global_step7").mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    args = json.loads((tmp_path / "out" / "megatron_args.json").read_text())
    torch.save({"args": argparse.Namespace(**args)}, folder / "global_step7" / "mp_rank_00_model_states.pt")
    keys = list(state)
    for number, part in enumerate((keys[:9], keys[9:])):
        torch.save({key: state[key] for key in part}, folder / f"pytorch_model-0000{number + 1}-of-00002.bin")
    where = {key: f"pytorch_model-0000{1 + (n >= 9)}-of-00002.bin" for n, key in enumerate(keys)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    with open_source(folder, "consolidated") as opened:
        same(opened, source, ("weight",))
