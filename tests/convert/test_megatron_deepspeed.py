"""BLOOM's own layout, read: every tensor and the optimizer's state, of any layout; replicas that differ; files that are
not whole.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.config.derive import query_groups
from megazero.convert.formats import TargetOptions
from megazero.convert.megatron_deepspeed.reader import open_megatron_deepspeed
from megazero.convert.megatron_deepspeed.writer import write_megatron_deepspeed
from megazero.convert.registry import open_source
from megazero.convert.source import MOMENTS, WEIGHT
from tests.convert.bloom_files import Layout, save_bloom
from tests.convert.sources import AS_LLAMA, BLOOM, made

BLOOM4 = replace(BLOOM, num_layers=3, hidden_size=16, num_attention_heads=4)
LLAMA = replace(BLOOM4, embedding_layernorm=False, **AS_LLAMA)
GPT = replace(BLOOM4, position_embedding="learned", embedding_layernorm=False)


def globals_of(model: Any, *columns: str) -> dict[str, dict[str, torch.Tensor]]:
    """Values whose masters, rounded, are what the layer files hold."""
    source = made(model, moments=True)
    return {column: {name: source.read(name, column) for name in source.entries} for column in columns}


EVERYTHING = (WEIGHT, *MOMENTS)


@pytest.mark.few(cases=3)
@pytest.mark.parametrize(
    "model", [BLOOM4, GPT, replace(BLOOM4, untie_embeddings_and_output_weights=True)], ids=["bloom", "gpt", "untied"]
)
@pytest.mark.parametrize(
    "layout",
    [Layout(1, (3,)), Layout(2, (1, 2), 2), Layout(4, (2, 1), 2), Layout(2, (1, 1, 1), 3)],
    ids=["1", "tp2pp2dp2", "tp4pp2dp2", "pp3dp3"],
)
def test_everything_is_read(tmp_path: Path, model: Any, layout: Layout) -> None:
    values = globals_of(model, *EVERYTHING)
    inside = save_bloom(values, model, tmp_path, layout)
    for path in (tmp_path, inside):
        with open_megatron_deepspeed(path) as source:
            assert source.columns == EVERYTHING and source.run.optimizer.precision == "bf16"
            assert source.model == replace(model, ffn_hidden_size=64, max_position_embeddings=16), source.model
            for column in EVERYTHING:
                for name in source.entries:
                    assert torch.equal(source.read(name, column), values[column][name]), (name, column)
            position = source.position
            assert (position.iteration, position.consumed_samples, position.consumed_tokens) == (4, 32, 512)
            assert position.optimizer_steps == 4.0
            assert source.run.optimizer.weight_decay == 0.1 and source.run.optimizer.adam_beta2 == 0.95
            assert not source.report.replicas and not source.report.apart


def test_weights_alone(tmp_path: Path) -> None:
    values = globals_of(BLOOM4, WEIGHT)
    save_bloom(values, BLOOM4, tmp_path, Layout(2, (3,)))
    with open_megatron_deepspeed(tmp_path) as source:
        assert source.columns == (WEIGHT,)
        for name in source.entries:
            assert torch.equal(source.read(name), values[WEIGHT][name].bfloat16())
        notes = str(source.report.notes)
        assert "weights only" in notes and "31 rows that pad the vocabulary of 97 to 128" in notes
        assert len(source.report.mapped) == 3 + 3 * 12 + 2


def test_replicas_that_differ_are_averaged_and_named(tmp_path: Path) -> None:
    values = globals_of(BLOOM4, *EVERYTHING)
    spoil = {
        ("blocks.1.attention_norm.weight", 0): 0.5,
        ("blocks.1.attention_norm.weight", 3): -1.5,
        ("head.norm.bias", 2): 4.0,
    }
    save_bloom(values, BLOOM4, tmp_path, Layout(4, (1, 2), 2), spoil=spoil)
    with open_megatron_deepspeed(tmp_path) as source:
        for column in EVERYTHING:
            found = source.read("blocks.1.attention_norm.weight", column)
            copies = [values[column]["blocks.1.attention_norm.weight"] + d for d in (0.5, 0.0, 0.0, -1.5)]
            assert torch.equal(found, torch.stack(copies).double().mean(dim=0).float())
            source.read("head.norm.bias", column)
            source.read("head.norm.bias", column)
            source.read("blocks.0.attention_norm.weight", column)
        named = {r.key: (r.copies, round(r.largest, 5)) for r in source.report.replicas}
        assert {named[f"layer 4 input_layernorm.weight {column}"] for column in ("weight", "exp_avg")} == {(4, 1.25)}
        assert named["layer 7 bias exp_avg_sq"] == (4, 3.0) and len(named) == len(source.report.replicas)
        assert not [key for key in named if not key.startswith(("layer 4 input_layernorm.weight", "layer 7 bias"))]
        assert not source.report.apart, "a mean of rounded replicas is no other step's weight"


WRITTEN = [
    (BLOOM4, TargetOptions()),
    (BLOOM4, TargetOptions(tp=2, pp=2, dp=2)),
    (BLOOM4, TargetOptions(tp=4, pp=3, dp=3)),
    (GPT, TargetOptions(tp=2, pp=5, dp=1)),
    (replace(BLOOM4, untie_embeddings_and_output_weights=True), TargetOptions(tp=2, pp=2, dp=2)),
    (LLAMA, TargetOptions(tp=2, pp=2, dp=2)),
]


@pytest.mark.few(cases=3)
@pytest.mark.parametrize(("model", "wanted"), WRITTEN)
@pytest.mark.parametrize("moments", [True, False], ids=["moments", "weights"])
def test_what_is_written_is_read_again(tmp_path: Path, model: Any, wanted: TargetOptions, moments: bool) -> None:
    source = made(model, moments=moments, precision="bf16", dtype=torch.bfloat16)
    counted: list[int] = []
    write_megatron_deepspeed(source, tmp_path, wanted, counted.append)
    assert sum(counted) == source.nbytes
    with open_source(tmp_path) as read:
        assert read.format == "megatron-deepspeed" and read.columns == source.columns
        assert list(read.entries) == list(source.entries)
        filled = ("ffn_hidden_size", "max_position_embeddings", "num_query_groups")
        assert read.model == replace(model, **{name: getattr(read.model, name) for name in filled})
        assert query_groups(read.model) == query_groups(model)
        assert replace(read.position, loss_scale=None) == source.position
        for column in source.columns:
            for name in source.entries:
                assert torch.equal(read.read(name, column), source.read(name, column)), (name, column)
        assert not read.report.replicas and not read.report.apart
    files = {path.name for path in (tmp_path / "global_step7").iterdir()}
    layers = len({name for name in files if name.startswith("layer_")})
    assert layers == (model.num_layers + (3 if model.untie_embeddings_and_output_weights else 2)) * wanted.tp
    assert len({name for name in files if name.endswith("optim_states.pt")}) == (
        wanted.tp * wanted.pp * wanted.dp if moments else 0
    )


def test_layer_files_hold_what_the_description_says(tmp_path: Path) -> None:
    """Beside files that the test cuts by itself: the same names, keys, shapes and values."""
    values = globals_of(BLOOM4, *EVERYTHING)
    theirs = save_bloom(values, BLOOM4, tmp_path / "theirs", Layout(2, (1, 2), 2, rows=256))
    source, wanted = made(BLOOM4, moments=True, precision="bf16"), TargetOptions(tp=2, pp=2, dp=2)
    write_megatron_deepspeed(source, tmp_path / "ours", wanted, lambda count: None)
    ours = tmp_path / "ours" / "global_step7"
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    for path in sorted(theirs.glob("layer_*")):
        wanted, found = torch.load(path, weights_only=True), torch.load(ours / path.name, weights_only=True)
        assert list(wanted) == list(found)
        for key in wanted:
            if key == "word_embeddings.weight":
                rows = 97 if "model_00" in path.name else 0
                assert found[key].shape == wanted[key].shape == (128, 16)
                assert torch.equal(wanted[key][:rows], found[key][:rows]) and not found[key][rows:].any()
            else:
                assert torch.equal(wanted[key], found[key]), (path.name, key)


def test_a_source_of_this_format_goes_through_unchanged(tmp_path: Path) -> None:
    """fp16, another layout on each side, the loss scaler's state."""
    values = globals_of(BLOOM4, *EVERYTHING)
    save_bloom(values, BLOOM4, tmp_path / "a", Layout(4, (2, 1), 3), dtype=torch.float16, bf16=False, fp16=True)
    with open_source(tmp_path / "a") as first:
        assert first.run.optimizer.precision == "fp16"
        # 24 good iterations since the last overflow, doubled after 11 and 21: 3 towards the next
        assert first.position.loss_scale == {"scale": 4096.0, "good_steps": 3, "overflows": 1}
        assert (first.run.optimizer.loss_scale_window, first.run.optimizer.hysteresis) == (10, 2)
        write_megatron_deepspeed(first, tmp_path / "b", TargetOptions(tp=2, pp=1, dp=2), lambda count: None)
    with open_source(tmp_path / "b") as second:
        assert second.position == first.position and second.run.optimizer == first.run.optimizer
        for column in EVERYTHING:
            for name in second.entries:
                assert torch.equal(second.read(name, column), values[column][name]), (name, column)
