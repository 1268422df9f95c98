"""Presets against the sizes in their names and the table of the published recipes."""

from __future__ import annotations

import pytest

from megazero.config.derive import ffn_width, padded_vocab, query_groups
from megazero.config.inventory import parameters
from megazero.config.parse import ConfigError, parse_run
from megazero.config.presets import presets
from tests.lengths import samples

PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "llama-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma3-1b": 999_885_952,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "smollm3-3b": 3_075_098_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
}
# files of these models hold a vision tower of 416,866,032 parameters too, and its norm and projection to the text model
TOWER, TOWER_WIDTH = 416_866_032, 1152
GEMMA3 = {"gemma3-4b": 4_300_079_472, "gemma3-12b": 12_187_325_040, "gemma3-27b": 27_432_406_640}
ROUGHLY = {"gpt3-125m": 125e6, "gpt3-350m": 356e6, "gpt3-760m": 760e6, "gpt3-1.3b": 1.3e9}
ROUGHLY |= {"gpt3-2.7b": 2.65e9, "gpt3-6.7b": 6.7e9, "gpt3-13b": 13.0e9, "gpt3-175b": 174.6e9}

BLOOM = {
    "bloom-560m": (24, 1024, 16, 3.0e-4, 1e-5, 256, (192, 32), "fp16"),
    "bloom-1b1": (24, 1536, 16, 2.5e-4, 1e-5, 256, (192, 16), "fp16"),
    "bloom-1b7": (24, 2048, 16, 2.0e-4, 1e-5, 512, (192, 16), "fp16"),
    "bloom-3b": (30, 2560, 32, 1.6e-4, 1e-5, 512, (192, 32), "fp16"),
    "bloom-7b1": (30, 4096, 32, 1.2e-4, 1e-5, 512, (192, 32), "fp16"),
    "bloom-176b": (70, 14336, 112, 6e-5, 6e-6, 2048, (192, 16), "bf16"),
}


def test_every_preset_has_a_size_to_be_held_to() -> None:
    assert {*PARAMETERS, *ROUGHLY, *GEMMA3} == set(presets())


@pytest.mark.parametrize("name", GEMMA3)
def test_parameters_beside_a_vision_tower(name: str) -> None:
    model = parse_run(["--preset", name], None).model
    assert parameters(model) + TOWER + TOWER_WIDTH * (model.hidden_size + 1) == GEMMA3[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_exactly(name: str) -> None:
    assert parameters(parse_run(["--preset", name], None).model) == PARAMETERS[name]


@pytest.mark.parametrize("name", ROUGHLY)
def test_parameters_as_the_paper_rounds_them(name: str) -> None:
    assert parameters(parse_run(["--preset", name], None).model) == pytest.approx(ROUGHLY[name], rel=0.02)


@pytest.mark.parametrize("name", BLOOM)
def test_bloom_recipes(name: str) -> None:
    run = parse_run(["--preset", name], None)
    m, o, s = run.model, run.optimizer, run.schedule
    layers, hidden, heads, lr, min_lr, batch, ramp, precision = BLOOM[name]
    assert (m.num_layers, m.hidden_size, m.num_attention_heads) == (layers, hidden, heads)
    assert (s.lr, s.min_lr, s.global_batch_size, s.rampup_batch_size) == (lr, min_lr, batch, (*ramp, 9_765_625))
    assert (s.lr_decay_style, s.lr_warmup, s.lr_decay) == ("cosine", samples(183_105), samples(200_000_000))
    assert (o.precision, o.optimizer, o.adam_beta1, o.adam_beta2, o.adam_eps) == (precision, "adamw", 0.9, 0.95, 1e-8)
    assert (o.weight_decay, o.clip_grad, m.init_method_std) == (0.1, 1.0, 0.0048)
    assert (m.vocab_size, m.seq_length, m.position_embedding, m.embedding_layernorm) == (250_880, 2048, "alibi", True)
    assert (m.norm, m.norm_epsilon, m.activation) == ("layernorm", 1e-5, "gelu-tanh")
    assert ffn_width(m) == 4 * hidden and query_groups(m) == heads and not m.untie_embeddings_and_output_weights


def test_derived_numbers() -> None:
    model = parse_run(["--activation", "swiglu", "--hidden-size", "4096", "--num-attention-heads", "32"], None).model
    assert ffn_width(model) == 10_944, "8/3 of 4096 is 10922.7, the next multiple of 64"
    llama = parse_run(["--preset", "llama-7b"], None).model
    assert ffn_width(llama) == 11_008
    by = "--make-vocab-size-divisible-by"
    for words, tp, padded in (
        (["--vocab-size", "1003"], 3, 1152),
        (["--vocab-size", "5", by, "4"], 4, 16),
        (["--vocab-size", "1003", by, "1"], 3, 1005),
        (["--preset", "bloom-176b"], 4, 250_880),
    ):
        assert padded_vocab(parse_run(words, None).model, tp) == padded


@pytest.mark.parametrize("name", presets())
def test_a_recipe_can_be_run_for_a_few_iterations(name: str) -> None:
    schedule = parse_run(["--preset", name, "--train-iters", "10"], None).schedule
    assert (schedule.train_iters, schedule.train_samples) == (10, None)


def test_names_are_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean bloom-176b"):
        parse_run(["--preset", "Bloom176b"], None)
