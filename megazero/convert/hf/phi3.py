"""Phi-3 and Phi-4 mini (Abdin et al. 2024, arXiv:2404.14219): query, key and value are one matrix, and gate and up."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.config.schema import ModelConfig
from megazero.convert.hf import layer_keys as layers
from megazero.convert.hf.llama import BEFORE, GATED, decoder, decoder_names, head_dim_apart, sizes, untied
from megazero.convert.hf.rearrange import FIRST_HALF, FUSED, SECOND_HALF
from megazero.convert.hf.rope import rope, scaled_by, two_minds
from megazero.convert.hf.rules import Rule
from megazero.convert.hf.shared import ANY, OWN_CODE, SHARE, head_width
from megazero.convert.hf.tables import Config, ModelRequirement, SupportedValues, one_of

_GATE, _UP = "blocks.{i}.mlp.gate.weight", "blocks.{i}.mlp.up.weight"
_BOTH = ("layers.{i}.mlp.gate_up_proj.weight",)
NAMES = decoder_names(
    BEFORE,
    attention=(Rule("blocks.{i}.attention.qkv.weight", ("layers.{i}.self_attn.qkv_proj.weight",), FUSED),),
    mlp=(Rule(_GATE, _BOTH, FIRST_HALF, (_GATE, _UP)), Rule(_UP, _BOTH, SECOND_HALF, (_GATE, _UP))),
)


_OF_OWN_CODE = tuple(
    SupportedValues(key, 1, (1, None), "a key of the code beside the weights, which is not run")
    for key in ("full_attn_mod", "interpolate_factor")
)


def _listed_width(model: ModelConfig) -> int | str:
    """transformers wants as many divisors as a head of hidden / heads has pairs, whatever the head's width is."""
    return SHARE if model.rotary_scaling is None else head_width(model)


_NEEDS = (
    scaled_by("longrope"),
    ModelRequirement("--kv-channels beside --rotary-scaling", _listed_width, (SHARE,)),
)


def _problems(config: Config) -> Iterator[str]:
    yield from two_minds(config)
    for key in ("resid_pdrop", "embd_pdrop"):
        if config.get(key):
            yield f"{key} {config[key]!r}: no dropout of its own is at that place; set {key} to 0"


FAMILY = decoder(
    "phi3",
    "Phi3ForCausalLM",
    (
        *sizes(32064, 3072, 8192, 32, 32, None, 4096, 1e-5),
        *(head_dim_apart(), one_of("activation", "silu", GATED, "hidden_act"), untied(False)),
        rope(length=4096, partial=True, renamed={"su": "longrope", "yarn": "longrope"}),
        layers.layer_keys(32, ("sliding_window",), layers.everywhere(None), layers.of_window_alone),
    ),
    names=NAMES,
    fixed={"attention_bias": False, "mlp_bias": False},
    eos=32000,
    further=_problems,
    # the folders bring the code with which older versions of transformers open them
    demands=(*(demand for demand in ANY if demand is not OWN_CODE), *_OF_OWN_CODE),
    needs=_NEEDS,
    windows=True,
    also="resid_pdrop embd_pdrop",
    written=lambda model: {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
)
