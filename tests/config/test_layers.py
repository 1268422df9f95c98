"""Patterns of layers, and the layers that a model has by them."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero.config.derive import ffn_width
from megazero.config.inventory import block_shapes, elements, fp8_layers, linears, parameters, shapes
from megazero.config.layers.kinds import kinds, layers
from megazero.config.layers.pattern import LayerPattern, PatternItem, RotarySet
from megazero.config.model_shape import shape_settings
from megazero.config.parse import parse_run
from megazero.config.rotary import RotaryScaling, RotarySettings
from megazero.config.schema import ModelConfig, OffloadConfig, ScheduleConfig
from megazero.config.source import ConfigError
from megazero.pipeline.stage_specs import chunk_layers, layer_costs
from megazero.plan.flops import attention_core_flops, block_flops, model_flops

MODEL = ModelConfig(6, 24, 6, vocab_size=101, seq_length=32, position_embedding="rotary")

PATTERNS = {
    "full": (PatternItem(),),
    "window:1024 local x5, full": (*[PatternItem(1024, positions="local")] * 5, PatternItem()),
    "chunk:8 none, full alibi ffn:96": (
        PatternItem(chunk=8, positions="none"),
        PatternItem(positions="alibi", width=96),
    ),
}


@pytest.mark.parametrize("text", PATTERNS)
def test_a_pattern_is_read_and_printed(text: str) -> None:
    pattern = LayerPattern.parsed(text)
    assert pattern.items == PATTERNS[text] and str(pattern) == text
    assert LayerPattern.parsed(f"  {text.replace(',', ' , ')} ") == pattern


def test_a_pattern_repeats_and_is_cut() -> None:
    """Gemma 3 of 7 layers: five with a window, one without, one with."""
    windows = [item.window for item in LayerPattern.parsed("window:4 x5, full").layers(7)]
    assert windows == [4, 4, 4, 4, 4, None, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full:3", "'full:3' in 'full:3' is none of full, window:W"),
        ("full: alibi", "'full:' in 'full: alibi' is none of full, window:W"),
        ("full x2 x3", "'x2' in 'full x2 x3' repeats an item, and stands at its end"),
        ("x2 full", "'x2' in 'x2 full' repeats an item, and stands at its end"),
        ("full x" + "9" * 5000, "'full x99"),
        ("window:" + "9" * 19, f"'window:{'9' * 19}' in 'window:{'9' * 19}': '{'9' * 19}' is not a whole number"),
    ],
)
def test_a_pattern_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        LayerPattern.parsed(text)


@pytest.mark.parametrize(("text", "number"), [("window:4 x5, full", 14), ("full, window:2", 2), ("window:3", 5)])
def test_the_shortest_pattern_of_layers(text: str, number: int) -> None:
    pattern = LayerPattern.parsed(text)
    assert LayerPattern.shortest(pattern.layers(number)) == pattern
    assert LayerPattern.shortest((PatternItem(),) * number) is None


def test_none_alone_is_a_pattern_as_in_a_file(tmp_path: Path) -> None:
    """The word says in a pattern that layers have no positions, on a command line too."""
    (tmp_path / "run.yaml").write_text("model: {layer_pattern: none}\n")
    for flags in (["--layer-pattern", "none"], ["--config", str(tmp_path / "run.yaml")]):
        assert parse_run(flags, 1).model.layer_pattern == LayerPattern((PatternItem(positions="none"),)), flags


WORDS = [
    (ModelConfig, "layer_pattern", "window:4", "LayerPattern"),
    (ModelConfig, "rotary_scaling", "linear factor=2", "RotaryScaling"),
    (ModelConfig, "rotary_sets", ("near base=7",), "RotarySet"),
    (OffloadConfig, "offload_params", "cpu", "TierShare"),
    (ScheduleConfig, "train_length", 500, "Length"),
]


@pytest.mark.parametrize(("section", "field", "word", "kind"), WORDS)
def test_a_word_in_the_place_of_a_value_is_refused_at_once(section: type, field: str, word: Any, kind: str) -> None:
    """From Python; else the first that asks the layers of such a model finds that a str has no items."""
    part = word[0] if isinstance(word, tuple) else word
    with pytest.raises(TypeError) as refused:
        section(**{field: word})
    assert str(refused.value) == (
        f"{section.__name__}.{field} is {part!r}, not a {kind}; {kind}.parsed makes one of a text"
    )
    with pytest.raises(TypeError, match=f"^{section.__name__}.{field} is "):
        replace(section(), **{field: word})


def test_what_no_text_makes_is_refused_at_once() -> None:
    """From Python: a file would have another pattern of it, or none."""
    for window, chunk, width, message in (
        (4, 8, None, "window 4 and chunk 8: a layer has one of them"),
        (0, None, None, "window 0 is not a whole number above 0"),
        (None, -3, None, "chunk -3 is not a whole number above 0"),
        (None, None, 0, "width 0 is not a whole number above 0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            PatternItem(window, chunk, width=width)
    with pytest.raises(ValueError, match=r"^a pattern of layers has one item or more$"):
        LayerPattern(())


def test_an_item_may_say_what_the_model_has_anyway() -> None:
    """Such a pattern makes the same layers: a resume and a conversion compare it as the one without these words."""
    plain = replace(MODEL, num_layers=2, layer_pattern=LayerPattern.parsed("window:8, full none"))
    said = LayerPattern.parsed(f"window:8 rotary ffn:{ffn_width(MODEL)}, full none ffn:{ffn_width(MODEL)}")
    assert shape_settings(replace(plain, layer_pattern=said)) == shape_settings(plain)
    assert layers(replace(plain, layer_pattern=said)) == layers(plain)
    assert "layer_pattern" not in shape_settings(replace(MODEL, layer_pattern=LayerPattern.parsed("full rotary")))


def test_words_beyond_the_last_layer_are_checked() -> None:
    with pytest.raises(ConfigError, match="far names no positions"):
        parse_run(["--num-layers", "4", "--layer-pattern", "full x4, full far"], 1)


@pytest.mark.parametrize(
    ("pattern", "number", "message"),
    [
        (
            "window:8 x5, full, window:4 x9",
            3,
            "--layer-pattern window:8 x5, full, window:4 x9 says what 15 layers are, and --num-layers 3 has no layer "
            "for window:8 x2, full, window:4 x9; nearest: --num-layers 15, or --layer-pattern 'window:8 x3'",
        ),
        (
            "full, window:4 none",
            1,
            "--layer-pattern full, window:4 none says what 2 layers are, and --num-layers 1 has no layer for window:4 "
            "none; nearest: --num-layers 2, or --layer-pattern 'full'",
        ),
    ],
)
def test_items_without_a_layer_are_refused(pattern: str, number: int, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run(["--num-layers", str(number), "--layer-pattern", pattern], 1)
    assert refused.value.problems == (message,)
    for cure in re.findall("--[a-z-]+ (?:[0-9]+|'.*?')", message.rpartition("nearest: ")[2]):
        parse_run(["--num-layers", str(number), "--layer-pattern", pattern, *shlex.split(cure)], 1)


@pytest.mark.parametrize("pattern", ["full x12", "window:4 x5", "full, window:4, full, window:4", "full x2, window:2"])
def test_a_pattern_that_goes_on_alike_may_be_cut(pattern: str) -> None:
    parse_run(["--num-layers", "3", "--layer-pattern", pattern], 1)


def test_the_pattern_of_a_preset_or_a_file_is_for_models_of_all_sizes(tmp_path: Path) -> None:
    """Gemma 3 of three layers: five with a window and then one without is what the family says."""
    (tmp_path / "run.yaml").write_text("model: {layer_pattern: 'window:4 x5, full'}\n")
    assert len(layers(parse_run("--preset gemma3-1b --num-layers 3".split(), 1).model)) == 3
    assert len(layers(parse_run(["--config", str(tmp_path / "run.yaml"), "--num-layers", "3"], 1).model)) == 3
    gemma = "--preset gemma3-1b --num-layers 1 --rotary-sets 'local base=7'"
    assert layers(parse_run(shlex.split(gemma), 1).model)[0].mixer.rotary == RotarySettings(7.0)


def test_a_command_line_replaces_the_pattern_of_a_preset() -> None:
    model = parse_run("--preset gemma3-1b --layer-pattern full --rotary-sets none".split(), 1).model
    assert {layer.mixer.window for layer in layers(model)} == {None} and model.rotary_sets == ()


def test_a_set_of_rotary_settings_is_read_and_printed() -> None:
    scaling = RotaryScaling.parsed("linear factor=8")
    settings = RotarySettings(500.0, 0.5, True, scaling)
    text = "far base=500 share=0.5 interleaved=true scaling=linear factor=8"
    assert RotarySet.parsed(text) == RotarySet("far", settings) and str(RotarySet("far", settings)) == text
    assert RotarySet.parsed("near") == RotarySet("near", RotarySettings())


@pytest.mark.parametrize(
    "text",
    [
        *("", "rotary base=5", "far base=x", "far base=-1", "far speed=3", "far share=2"),
        *("far base=5 base=7", "x2 base=5", "window base=5"),
    ],
)
def test_a_set_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        RotarySet.parsed(text)


def mixed(**more: Any) -> ModelConfig:
    pattern = LayerPattern.parsed("window:8 local, full none ffn:48, chunk:5")
    return replace(MODEL, layer_pattern=pattern, rotary_sets=(RotarySet.parsed("local base=7"),), **more)


def test_layers_are_what_the_pattern_says() -> None:
    model = mixed()
    first, second, third, *again = layers(model)
    assert again == [first, second, third] and [*kinds(model).values()] == [2, 2, 2]
    assert (first.mixer.window, first.mixer.chunk, second.mixer.window, third.mixer.chunk) == (8, None, None, 5)
    assert first.mixer.rotary == RotarySettings(7.0) and second.mixer.rotary is None
    assert third.mixer.rotary == RotarySettings(10000.0)
    assert (first.mlp.width, second.mlp.width) == (96, 48)
    assert [layer.mixer.keys(32) for layer in (first, second, third)] == [8, 32, 5]
    assert [layer.mixer.keys(4) for layer in (first, second, third)] == [4, 4, 4]


def test_what_is_multiplied_by_layers_asks_each_layer() -> None:
    """Layers of other widths and reaches have other numbers of parameters, operations and costs."""
    model = mixed()
    wide, narrow, _ = layers(model)[:3]
    sizes = [elements(block_shapes(layer)) for layer in layers(model)]
    assert sizes[0] - sizes[1] == 2 * 24 * 48 + 48  # up with its bias, and down
    assert parameters(model) == sum(math.prod(shape) for _, shape in shapes(model))
    assert parameters(model) == parameters(replace(model, layer_pattern=None)) - 2 * (sizes[0] - sizes[1])
    assert attention_core_flops(wide, 32) == 4 * 32 * 8 * 24 and attention_core_flops(narrow, 32) == 4 * 32 * 32 * 24
    of_blocks = sum(block_flops(layer, 32) for layer in layers(model))
    assert model_flops(model, 2) == 3 * 2 * (of_blocks + 2 * 32 * 24 * 101)
    run = replace(parse_run([], 1), model=model)
    _, costs, _ = layer_costs(run)
    assert costs == tuple(sizes)


def test_the_partition_balances_layers_of_unequal_sizes() -> None:
    """Six layers of which the last two are wide: an equal number on each stage is not the best."""
    words = "--num-layers 6 --hidden-size 24 --num-attention-heads 6 --vocab-size 10 --pp 2 --seq-length 8"
    even = chunk_layers(parse_run(words.split(), 2))
    pattern = ["--layer-pattern", "ffn:24 x4, ffn:600 x2"]
    assert even == (3, 3) and chunk_layers(parse_run([*words.split(), *pattern], 2)) == (5, 1)


def test_fp8_layers_are_those_of_each_kind() -> None:
    words = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--fp8", "--precision", "bf16"]
    run = parse_run([*words, "--layer-pattern", "ffn:40, ffn:64"], 1)
    assert [name for name in fp8_layers(run) if ".mlp." in name] == ["blocks.1.mlp.up", "blocks.1.mlp.down"]


def test_biases_of_each_matrix() -> None:
    """Qwen 2.5 has those of queries, keys and values alone."""
    model = replace(MODEL, disable_bias_linear=True, qkv_bias=True)
    assert {linear.name for linear in linears(layers(model)[0]) if linear.bias} == {"attention.qkv"}
    model = replace(MODEL, attention_output_bias=False)
    assert {linear.name for linear in linears(layers(model)[0]) if not linear.bias} == {"attention.output"}
