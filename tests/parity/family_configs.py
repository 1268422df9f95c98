"""Random configurations of the families that `transformers` computes, tiny and odd, in newer and older words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.convert.hf_models import Case

VOCABULARY = 97
Words = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """older: config.json is rewritten as versions 4 of transformers wrote the file."""

    name: str
    case: Case
    length: int
    older: bool


def _scaling(width: int, draw: random.Random, kinds: tuple[str, ...] = ()) -> Words:
    """rope_parameters of `width` dimensions of a head, which turn."""
    kind = draw.choice(kinds or ("default", "linear", "dynamic", "llama3", "yarn", "longrope"))
    words: Words = {"rope_type": kind, "rope_theta": draw.choice((100.0, 1e4, 5e5))}
    if kind != "default":
        words["factor"] = draw.choice((2.0, 4.0, 8.5))
    if kind in ("llama3", "longrope") or (kind == "yarn" and draw.random() < 0.5):
        words["original_max_position_embeddings"] = draw.choice((8, 16))
    return words | _FURTHER.get(kind, lambda width, draw: {})(width, draw)


def _some(draw: random.Random, share: float = 0.5, **values: tuple[Any, ...]) -> Words:
    """Each key with one of its values, or without the key."""
    return {key: draw.choice(choices) for key, choices in values.items() if draw.random() < share}


def _of_yarn(width: int, draw: random.Random) -> Words:
    return _some(draw, beta_fast=(16.0, 32.0), beta_slow=(1.0, 2.0)) | _some(
        draw, 0.3, attention_factor=(1.3,), mscale=(1.2,), mscale_all_dim=(0.7,), truncate=(False, True)
    )


def _of_longrope(width: int, draw: random.Random) -> Words:
    lists = {f"{length}_factor": [draw.uniform(1, most) for _ in range(width // 2)] for length, most in _MOST.items()}
    return lists | _some(draw, 0.3, attention_factor=(1.2,))


_MOST = {"short": 2.0, "long": 6.0}
_FURTHER: Mapping[str, Callable[[int, random.Random], Words]] = MappingProxyType(
    {
        "llama3": lambda width, draw: {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": _of_yarn,
        "longrope": _of_longrope,
    }
)


def _kinds(layers: int, draw: random.Random) -> list[str]:
    return [draw.choice(("sliding_attention", "full_attention")) for _ in range(layers)]


def _rope(words: Words, width: int, draw: random.Random) -> Words:
    return {"rope_parameters": _scaling(width, draw)}


def _llama(words: Words, width: int, draw: random.Random) -> Words:
    return _rope(words, width, draw) | _some(draw, attention_bias=(True, False), mlp_bias=(True, False))


def _qwen(words: Words, width: int, draw: random.Random) -> Words:
    layers = words["num_hidden_layers"]
    more = _rope(words, width, draw) | {"sliding_window": draw.choice((3, 5, 8))}
    more |= {"max_window_layers": draw.choice((0, 1, 3, 10))}
    more |= {"use_sliding_window": True} if draw.random() < 0.6 else {}
    return more | (
        {"layer_types": _kinds(layers, draw)} if more.get("use_sliding_window") and draw.random() < 0.5 else {}
    )


def _qwen3(words: Words, width: int, draw: random.Random) -> Words:
    return _qwen(words, width, draw) | _some(draw, attention_bias=(True, False))


def _mistral(words: Words, width: int, draw: random.Random) -> Words:
    return _rope(words, width, draw) | {"sliding_window": draw.choice((None, 4, 7))}


def _gemma2(words: Words, width: int, draw: random.Random) -> Words:
    caps = _some(draw, attn_logit_softcapping=(None, 2.0, 50.0))
    return _rope(words, width, draw) | caps | _gemma(words, draw)


def _gemma(words: Words, draw: random.Random) -> Words:
    more = {"sliding_window": draw.choice((3, 4, 6))}
    more |= _some(draw, query_pre_attn_scalar=(10, 7, 33), final_logit_softcapping=(None, 3.0))
    more |= _some(draw, hidden_activation=("gelu_pytorch_tanh", "gelu", "silu"), attention_bias=(True, False))
    return more | ({"layer_types": _kinds(words["num_hidden_layers"], draw)} if draw.random() < 0.4 else {})


def _gemma3(words: Words, width: int, draw: random.Random) -> Words:
    whole, local = _scaling(width, draw), _scaling(width, draw, ("default",) if draw.random() < 0.6 else ())
    rope = {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
    return _gemma(words, draw) | (rope if draw.random() < 0.8 else {})


def _phi3(words: Words, width: int, draw: random.Random) -> Words:
    share = draw.choice((1.0, 0.75, 0.5))
    if int(width * share) % 2:
        share = 1.0
    kinds = (
        ("default",) if "head_dim" in words else ("default", "longrope")
    )  # transformers counts pairs of hidden / heads
    rope = _scaling(int(width * share), draw, kinds) | {"partial_rotary_factor": share}
    original = {key: rope[key] for key in ("original_max_position_embeddings",) if key in rope}
    rope.pop("factor", None)  # follows from the two lengths
    return {"rope_parameters": rope, "sliding_window": draw.choice((None, 4, 7))} | original


def _smollm3(words: Words, width: int, draw: random.Random) -> Words:
    layers = words["num_hidden_layers"]
    positions = {"no_rope_layers": [draw.choice((0, 1)) for _ in range(layers)]}
    more = positions if draw.random() < 0.5 else _some(draw, no_rope_layer_interval=(2, 3, 4))
    windows: Words = {"use_sliding_window": True, "sliding_window": 4} if draw.random() < 0.4 else {}
    if windows and draw.random() < 0.5:
        windows["layer_types"] = _kinds(layers, draw)
    return _llama(words, width, draw) | more | windows


def _granite(words: Words, width: int, draw: random.Random) -> Words:
    multipliers = _some(draw, embedding_multiplier=(12.0, 0.5), residual_multiplier=(0.22, 1.5))
    multipliers |= _some(draw, attention_multiplier=(0.2, 0.05), logits_scaling=(3.0, 0.7))
    return _llama(words, width, draw) | multipliers


def _neox(words: Words, width: int, draw: random.Random) -> Words:
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps"):
        words.pop(key, None)
    width = draw.choice((8, 16, 20))
    share = draw.choice([share for share in (0.25, 0.5, 1.0) if int(width * share) % 2 == 0 and width * share > 2])
    more = {"hidden_size": width * words["num_attention_heads"]}
    more |= {"rope_parameters": _scaling(int(width * share), draw) | {"partial_rotary_factor": share}}
    more |= _some(draw, use_parallel_residual=(False, True), attention_bias=(False, True), layer_norm_eps=(1e-6, 1e-3))
    return more | _some(draw, hidden_act=("gelu", "gelu_new", "relu", "gelu_fast"))


KINDS: Mapping[str, Callable[[Words, int, random.Random], Words]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen,
        "qwen3": _qwen3,
        "mistral": _mistral,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3,
        "olmo2": lambda words, width, draw: _rope(words, width, draw) | _some(draw, attention_bias=(True, False)),
        "phi3": _phi3,
        "smollm3": _smollm3,
        "granite": _granite,
        "gpt_neox": _neox,
    }
)
"""model_type -> the keys that a family has beside those of all."""


def configs(count: int, seed: int) -> Iterator[Drawn]:
    """Each family in turn."""
    kinds = [*KINDS]
    for number in range(count):
        draw = random.Random(seed * 1000 + number)
        kind = kinds[number % len(kinds)]
        yield Drawn(
            f"{number} {kind}", Case(kind, (1,), _config(kind, draw)), draw.choice((6, 21)), draw.random() < 0.5
        )


def _config(kind: str, draw: random.Random) -> Words:
    groups, width = draw.choice((1, 2, 3)), draw.choice((6, 8, 10, 14, 16))
    heads = groups * draw.choice((1, 2, 3))
    own = kind.startswith("gemma") or kind == "qwen3" or draw.random() < 0.5
    words: Words = {
        "num_hidden_layers": draw.randint(1, 7),
        "vocab_size": VOCABULARY,
        "hidden_size": heads * (draw.choice((4, 8)) if own else width),
        "intermediate_size": draw.choice((26, 33)),
        "max_position_embeddings": draw.choice((24, 32)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    words |= {"head_dim": width} if own else {}
    words |= _some(draw, tie_word_embeddings=(True, False), rms_norm_eps=(1e-6, 1e-3))
    return words | KINDS[kind](words, width, draw)


def rewrite_older(folder: Path, case: Case, draw: random.Random) -> None:
    """config.json in the words of versions 4: positions at the top, and no layer_types that other keys say."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    both = config["rope_parameters"].get("sliding_attention")
    if both is None or both["rope_type"] == "default":
        rope = config.pop("rope_parameters")
        config |= {} if both is None else {"rope_local_base_freq": both["rope_theta"]}
        config |= _older_rope(rope if both is None else rope["full_attention"], case.kind, draw)
    if "layer_types" not in case.config:
        config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def _older_rope(rope: Words, kind: str, draw: random.Random) -> Words:
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    base, part = ("rotary_emb_base", "rotary_pct") if kind == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    words = {base: rope["rope_theta"], "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        words[part] = rope["partial_rotary_factor"]
    if (rope_type := scaling.pop("rope_type")) != "default":
        words["rope_scaling"] = {draw.choice(("type", "rope_type")): rope_type, **scaling}
    return words
