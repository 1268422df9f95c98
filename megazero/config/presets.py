"""Published models with their training recipes, as data: `--preset NAME`.

A preset sets the model and the recipe. It does not set the layout: tp, pp, micro-batch and ZeRO stage depend on the
cluster (examples/ has the layouts that were used). Every preset sets the length of its learning-rate decay, so that a
shorter run (--train-iters 1000) is the beginning of the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config.lengths import Length, Measure
from megazero.config.options import did_you_mean


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


def _llama(shape: Shape) -> dict[str, Any]:
    # Touvron et al. 2023: 4M tokens per batch, 1.0T tokens in all, 2,000 iterations of warm-up.
    return _common(shape) | {
        "ffn_hidden_size": 11_008,
        "position_embedding": "rotary",
        "embedding_layernorm": False,
        "norm": "rmsnorm",
        "norm_epsilon": 1e-6,
        "activation": "swiglu",
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
        "vocab_size": 32_000,
        "seq_length": 2048,
        "train_length": Length(238_419, Measure.ITERATIONS),
        "lr_decay": Length(238_419, Measure.ITERATIONS),
        "lr_warmup": Length(2_000, Measure.ITERATIONS),
    }


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Preset name -> field name -> value."""
    made = {name: _gpt2(shape) for name, shape in _GPT2.items()}
    made |= {name: _gpt3(shape) for name, shape in _GPT3.items()}
    made |= {name: _bloom(shape) for name, shape in _BLOOM.items()}
    made["llama-7b"] = _llama(Shape(32, 4096, 32, 3e-4, 2048))
    return MappingProxyType({name: MappingProxyType(settings) for name, settings in made.items()})


def preset(name: str) -> Mapping[str, Any]:
    """The settings of a preset. Raises ValueError with the nearest name and all names for an unknown one."""
    settings = presets().get(name.lower())
    if settings is None:
        raise ValueError(
            f"there is no preset {name!r}{did_you_mean(name.lower(), presets())} (known: {', '.join(presets())})"
        )
    return settings
