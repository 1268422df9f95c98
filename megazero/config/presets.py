"""Published models with their training recipes, as data: `--preset NAME`.

A preset sets the model and the recipe. It does not set the layout: tp, pp, micro-batch and ZeRO stage depend on the
cluster (examples/ has the layouts that were used). Every preset sets the length of its learning-rate decay, so that a
shorter run (--train-iters 1000) is the beginning of the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config.layers.pattern import LayerPattern, RotarySet
from megazero.config.lengths import Length, Measure
from megazero.config.options import did_you_mean
from megazero.config.rotary import RotaryScaling


class Shape(NamedTuple):
    """A row of a family's table. batch: samples per step; ramp: START INCREMENT SAMPLES."""

    layers: int
    hidden: int
    heads: int
    lr: float
    batch: int
    min_lr: float = 0.0
    ramp: tuple[int, ...] | None = None
    precision: str = "bf16"


class Decoder(NamedTuple):
    """A row of LLaMA or of a family after it. groups: key-value heads; None: as many as heads; width: of the
    feed-forward layer; size: of a head, where it is not hidden / heads; batch: samples per step.
    """

    layers: int
    hidden: int
    heads: int
    groups: int | None
    width: int
    lr: float
    batch: int
    size: int | None = None
    more: Mapping[str, Any] = MappingProxyType({})


# Shapes: Radford et al. 2019, table 2. The paper does not give the recipe: rates and batches are those of nanoGPT and
# of the GPT-3 models of the same size. 512 samples of 1,024 tokens; 600,000 iterations; 2,000 of warm-up.
_GPT2 = {
    "gpt2-124m": Shape(12, 768, 12, 6e-4, 512),
    "gpt2-355m": Shape(24, 1024, 16, 3e-4, 512),
    "gpt2-774m": Shape(36, 1280, 20, 2.5e-4, 512),
    "gpt2-1.5b": Shape(48, 1600, 25, 2e-4, 1024),
}

# Brown et al. 2020, table 2.1; batches in samples of 2,048 tokens. The table's 1.3B has 24 heads of 128 at width 2048,
# and its 13B has a width of 5140, which 40 heads do not divide. Here they have 16 heads and width 5120, as is usual.
_GPT3 = {
    "gpt3-125m": Shape(12, 768, 12, 6e-4, 256),
    "gpt3-350m": Shape(24, 1024, 16, 3e-4, 256),
    "gpt3-760m": Shape(24, 1536, 16, 2.5e-4, 256),
    "gpt3-1.3b": Shape(24, 2048, 16, 2e-4, 512),
    "gpt3-2.7b": Shape(32, 2560, 32, 1.6e-4, 512),
    "gpt3-6.7b": Shape(32, 4096, 32, 1.2e-4, 1024),
    "gpt3-13b": Shape(40, 5120, 40, 1e-4, 1024),
    "gpt3-175b": Shape(96, 12288, 96, 6e-5, 1536, ramp=(16, 16, 5_859_375)),
}

# BigScience, the runs tr11 and tr11b..f.
_RAMP = 9_765_625
_BLOOM = {
    "bloom-560m": Shape(24, 1024, 16, 3.0e-4, 256, 1e-5, (192, 32, _RAMP), "fp16"),
    "bloom-1b1": Shape(24, 1536, 16, 2.5e-4, 256, 1e-5, (192, 16, _RAMP), "fp16"),
    "bloom-1b7": Shape(24, 2048, 16, 2.0e-4, 512, 1e-5, (192, 16, _RAMP), "fp16"),
    "bloom-3b": Shape(30, 2560, 32, 1.6e-4, 512, 1e-5, (192, 32, _RAMP), "fp16"),
    "bloom-7b1": Shape(30, 4096, 32, 1.2e-4, 512, 1e-5, (192, 32, _RAMP), "fp16"),
    "bloom-176b": Shape(70, 14336, 112, 6e-5, 2048, 6e-6, (192, 16, _RAMP), "bf16"),
}

_ADAM = {
    "optimizer": "adamw",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
}


def _common(shape: Shape) -> dict[str, Any]:
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "lr": shape.lr,
        "min_lr": shape.min_lr or float(f"{shape.lr / 10:.3g}"),
        "lr_decay_style": "cosine",
        "global_batch_size": shape.batch,
        "rampup_batch_size": shape.ramp,
        "precision": shape.precision,
        **_ADAM,
    }


def _gpt(shape: Shape) -> dict[str, Any]:
    return _common(shape) | {
        "position_embedding": "learned",
        "embedding_layernorm": False,
        "norm": "layernorm",
        "activation": "gelu-tanh",
        "vocab_size": 50_257,
        "init_method_std": 0.02,
    }


def _gpt2(shape: Shape) -> dict[str, Any]:
    return _gpt(shape) | {
        "seq_length": 1024,
        "train_length": Length(600_000, Measure.ITERATIONS),
        "lr_decay": Length(600_000, Measure.ITERATIONS),
        "lr_warmup": Length(2_000, Measure.ITERATIONS),
    }


def _gpt3(shape: Shape) -> dict[str, Any]:
    # 300 billion tokens; warm-up over 375 million, cosine to a tenth at 260 billion.
    recipe = {
        "seq_length": 2048,
        "train_length": Length(146_484_375, Measure.SAMPLES),
        "lr_warmup": Length(183_105, Measure.SAMPLES),
        "lr_decay": Length(126_953_125, Measure.SAMPLES),
    }
    large = {"init_method_std": 0.006} if shape.layers == 96 else {}
    return _gpt(shape) | recipe | large


def _bloom(shape: Shape) -> dict[str, Any]:
    # The loss scale started at 2^12 and doubled every 500 steps without overflow.
    scale = {"initial_loss_scale": 4096.0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1.0}
    return (
        _common(shape)
        | {
            "position_embedding": "alibi",
            "embedding_layernorm": True,
            "norm": "layernorm",
            "norm_epsilon": 1e-5,
            "activation": "gelu-tanh",
            "vocab_size": 250_880,
            "seq_length": 2048,
            "init_method_std": 0.0048,
            "train_length": Length(220_000_000, Measure.SAMPLES),
            "lr_warmup": Length(183_105, Measure.SAMPLES),
            "lr_decay": Length(200_000_000, Measure.SAMPLES),
            "seed": 42,
        }
        | (scale if shape.precision == "fp16" else {})
    )


# Touvron et al. 2023 (arXiv:2302.13971): 4M tokens per batch, 1.0T tokens in all, 2,000 iterations of warm-up.
_LLAMA = {"llama-7b": Decoder(32, 4096, 32, None, 11_008, 3e-4, 2048)}

# Grattafiori et al. 2024 (arXiv:2407.21783), tables 3 and 4: 15.6T tokens, 8,000 iterations of warm-up, cosine. The
# batch grew from 4M tokens to 16M with samples of 8,192 tokens; here it is the last one of each size. The positions are
# those of the released 3.1 and 3.3, which reach over 131,072 tokens.
_LLAMA3 = {
    "llama3-8b": Decoder(32, 4096, 32, 8, 14_336, 3e-4, 1024),
    "llama3-70b": Decoder(80, 8192, 64, 8, 28_672, 1.5e-4, 2048),
    "llama3-405b": Decoder(126, 16_384, 128, 8, 53_248, 8e-5, 2048),
}

# Qwen Team 2025 (arXiv:2505.09388), table 1. The report does not give the recipe: rates and batches are usual ones for
# models of these sizes.
_TIED = MappingProxyType({"untie_embeddings_and_output_weights": False})
_QWEN3 = {
    "qwen3-0.6b": Decoder(28, 1024, 16, 8, 3072, 6e-4, 512, 128, _TIED),
    "qwen3-1.7b": Decoder(28, 2048, 16, 8, 6144, 4e-4, 512, 128, _TIED),
    "qwen3-4b": Decoder(36, 2560, 32, 8, 9728, 3e-4, 1024, 128, _TIED),
    "qwen3-8b": Decoder(36, 4096, 32, 8, 12_288, 3e-4, 1024, 128),
    "qwen3-14b": Decoder(40, 5120, 40, 8, 17_408, 2.5e-4, 1024, 128),
    "qwen3-32b": Decoder(64, 5120, 64, 8, 25_600, 2e-4, 2048, 128),
}


def _reach(window: int, **more: Any) -> Mapping[str, Any]:
    return MappingProxyType({"layer_pattern": LayerPattern.parsed(f"window:{window} local x5, full"), **more})


# Gemma Team 2025 (arXiv:2503.19786), the text models. The report does not give the recipe: rates and batches as above.
_FAR = {"rotary_scaling": RotaryScaling.parsed("linear factor=8"), "vocab_size": 262_208}
_GEMMA3 = {
    "gemma3-1b": Decoder(26, 1152, 4, 1, 6912, 4e-4, 512, 256, _reach(512)),
    "gemma3-4b": Decoder(34, 2560, 8, 4, 10_240, 3e-4, 1024, 256, _reach(1024, **_FAR)),
    "gemma3-12b": Decoder(48, 3840, 16, 8, 15_360, 2.5e-4, 1024, 256, _reach(1024, **_FAR)),
    "gemma3-27b": Decoder(62, 5376, 32, 16, 21_504, 2e-4, 2048, 128, _reach(1024, **_FAR, attention_scale=168**-0.5)),
}

# Team OLMo 2024 (arXiv:2501.00656), table 2: cosine over 5T tokens, which the 7B left after 4T.
_OLMO2 = {
    "olmo2-7b": Decoder(32, 4096, 32, 32, 11_008, 3e-4, 1024),
    "olmo2-13b": Decoder(40, 5120, 40, 40, 13_824, 9e-4, 2048),
}

# Biderman et al. 2023 (arXiv:2304.01373), table 6: 143,000 iterations of 1,024 samples, a hundredth of warm-up. The
# tables of the released models have the rows to which GPT-NeoX padded them for the layout.
_PYTHIA = {
    "pythia-160m": (Shape(12, 768, 12, 6e-4, 1024, precision="fp16"), 50_304),
    "pythia-410m": (Shape(24, 1024, 16, 3e-4, 1024, precision="fp16"), 50_304),
    "pythia-1b": (Shape(16, 2048, 8, 3e-4, 1024), 50_304),
    "pythia-1.4b": (Shape(24, 2048, 16, 2e-4, 1024, precision="fp16"), 50_304),
    "pythia-2.8b": (Shape(32, 2560, 32, 1.6e-4, 1024, precision="fp16"), 50_304),
    "pythia-6.9b": (Shape(32, 4096, 32, 1.2e-4, 1024, precision="fp16"), 50_432),
    "pythia-12b": (Shape(36, 5120, 40, 1.2e-4, 1024, precision="fp16"), 50_688),
}


def _decoder(shape: Decoder, tokens: float, length: int, warmup: int, **more: Any) -> dict[str, Any]:
    """tokens: of the whole training."""
    iterations = Length(round(tokens / length / shape.batch), Measure.ITERATIONS)
    sizes = Shape(shape.layers, shape.hidden, shape.heads, shape.lr, shape.batch)
    return _common(sizes) | {
        "num_query_groups": shape.groups,
        "kv_channels": shape.size,
        "ffn_hidden_size": shape.width,
        "position_embedding": "rotary",
        "embedding_layernorm": False,
        "norm": "rmsnorm",
        "norm_epsilon": 1e-6,
        "activation": "swiglu",
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
        "seq_length": length,
        "train_length": iterations,
        "lr_decay": iterations,
        "lr_warmup": Length(warmup, Measure.ITERATIONS),
        **more,
        **shape.more,
    }


def _llama(shape: Decoder) -> dict[str, Any]:
    return _decoder(shape, 1.0e12, 2048, 2000, vocab_size=32_000)


def _llama3(shape: Decoder) -> dict[str, Any]:
    scaling = "llama3 factor=8 low_freq_factor=1 high_freq_factor=4 original_max_position_embeddings=8192"
    return _decoder(
        shape,
        15.6e12,
        8192,
        8000,
        norm_epsilon=1e-5,
        vocab_size=128_256,
        rotary_base=500_000.0,
        rotary_scaling=RotaryScaling.parsed(scaling),
    )


def _qwen3(shape: Decoder) -> dict[str, Any]:
    return _decoder(shape, 36e12, 4096, 2000, vocab_size=151_936, rotary_base=1_000_000.0, query_key_norm="head")


def _gemma3(shape: Decoder) -> dict[str, Any]:
    return _decoder(
        shape,
        4e12,
        8192,
        2000,
        vocab_size=262_144,
        rotary_base=1_000_000.0,
        rotary_sets=(RotarySet.parsed("local base=10000.0"),),
        activation="geglu-tanh",
        norm_placement="both",
        norm_plus_one=True,
        query_key_norm="head",
        embedding_multiplier=math.sqrt(shape.hidden),
        untie_embeddings_and_output_weights=False,
    )


def _olmo2(shape: Decoder) -> dict[str, Any]:
    return _decoder(
        shape,
        5e12,
        4096,
        2000,
        vocab_size=100_352,
        rotary_base=500_000.0,
        norm_placement="after",
        query_key_norm="all",
        z_loss=1e-5,
    )


def _smollm3() -> dict[str, Any]:
    # Bakouch et al. 2025: 11T tokens, batches of 2.36M tokens, a rate that stays and falls over the last tenth
    shape = Decoder(36, 2048, 16, 4, 11_008, 2e-4, 576)
    return _decoder(
        shape,
        11e12,
        4096,
        2000,
        vocab_size=128_256,
        rotary_base=5_000_000.0,
        layer_pattern=LayerPattern.parsed("full x3, full none"),
        untie_embeddings_and_output_weights=False,
        min_lr=0.0,
        lr_decay_style="wsd",
    )


def _pythia(shape: Shape, vocabulary: int) -> dict[str, Any]:
    iterations = Length(143_000, Measure.ITERATIONS)
    return _common(shape) | {
        "position_embedding": "rotary",
        "rotary_share": 0.25,
        "embedding_layernorm": False,
        "norm": "layernorm",
        "activation": "gelu",
        "parallel_block": "two-norms",
        "untie_embeddings_and_output_weights": True,
        "vocab_size": vocabulary,
        "seq_length": 2048,
        "weight_decay": 0.01,
        "train_length": iterations,
        "lr_decay": iterations,
        "lr_warmup": Length(1430, Measure.ITERATIONS),
    }


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Preset name -> field name -> value."""
    made = {name: _gpt2(shape) for name, shape in _GPT2.items()}
    made |= {name: _gpt3(shape) for name, shape in _GPT3.items()}
    made |= {name: _bloom(shape) for name, shape in _BLOOM.items()}
    decoders = ((_llama, _LLAMA), (_llama3, _LLAMA3), (_qwen3, _QWEN3), (_gemma3, _GEMMA3), (_olmo2, _OLMO2))
    for of_family, table in decoders:
        made |= {name: of_family(shape) for name, shape in table.items()}
    made["smollm3-3b"] = _smollm3()
    made |= {name: _pythia(*row) for name, row in _PYTHIA.items()}
    return MappingProxyType({name: MappingProxyType(settings) for name, settings in made.items()})


def preset(name: str) -> Mapping[str, Any]:
    """The settings of a preset. Raises ValueError with the nearest name for an unknown one."""
    settings = presets().get(name.lower())
    if settings is None:
        raise ValueError(
            f"there is no preset {name!r}{did_you_mean(name.lower(), presets())} "
            f"(--help-all lists all {len(presets())})"
        )
    return settings
