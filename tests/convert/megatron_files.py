"""Megatron-LM's checkpoints, built from its source's description of them, without any code of the converters.

A rank's tensors are cut here, one by one, from global ones under our names; files are written with torch.save.
"""

from __future__ import annotations

import argparse
import io
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.config.derive import attention_bias, ffn_width, head_dim, mlp_bias, query_groups
from megazero.config.schema import ModelConfig
from megazero.convert.source import Source

ROWS = 8  # make_vocab_size_divisible_by


def megatron_args(model: ModelConfig, tp: int, pp: int, **more: Any) -> argparse.Namespace:
    shared = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")
    said: dict[str, Any] = {name: getattr(model, name) for name in (*shared, "untie_embeddings_and_output_weights")}
    grouped = query_groups(model) != model.num_attention_heads
    positions = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
    said |= {
        "group_query_attention": grouped,
        "num_query_groups": query_groups(model) if grouped else 1,
        "kv_channels": head_dim(model),
        "ffn_hidden_size": ffn_width(model),
        "padded_vocab_size": padded(model, tp),
        "make_vocab_size_divisible_by": ROWS,
        "max_position_embeddings": model.seq_length,
        "position_embedding_type": positions[model.position_embedding],
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        "layernorm_epsilon": model.norm_epsilon,
        "swiglu": model.activation == "swiglu",
        "bias_gelu_fusion": model.activation == "gelu-tanh",
        "add_bias_linear": mlp_bias(model),
        "add_qkv_bias": attention_bias(model) and not mlp_bias(model),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }
    said |= {"rotary_base": 10000, "rotary_percent": 1.0, "openai_gelu": False, "num_experts": None, "bf16": True}
    said |= {"params_dtype": torch.bfloat16, "consumed_train_samples": 84, "hysteresis": 2, "adam_beta2": 0.97}
    return argparse.Namespace(**said | more)


def padded(model: ModelConfig, tp: int) -> int:
    assert model.vocab_size is not None
    while True:
        rows = model.vocab_size
        while rows % (ROWS * tp):
            rows += 1
        return rows


class Cutter:
    """What a tensor-parallel rank holds, as Megatron's layers divide it."""

    def __init__(
        self, read: Callable[[str], Tensor], model: ModelConfig, tp: int, rank: int, dtype: torch.dtype
    ) -> None:
        self.read, self.model, self.tp, self.rank, self.dtype = read, model, tp, rank, dtype

    def same(self, name: str) -> Tensor:
        return self.read(name).to(self.dtype).clone()

    def rows(self, name: str) -> Tensor:
        whole = self.same(name)
        n = whole.shape[0] // self.tp
        return whole[self.rank * n : (self.rank + 1) * n].clone()

    def columns(self, name: str) -> Tensor:
        whole = self.same(name)
        n = whole.shape[1] // self.tp
        return whole[:, self.rank * n : (self.rank + 1) * n].clone()

    def vocabulary(self, name: str) -> Tensor:
        """Padding rows hold what training left there: no zeros."""
        whole = self.same(name)
        rows = padded(self.model, self.tp)
        whole = torch.cat([whole, torch.full((rows - whole.shape[0], whole.shape[1]), 7.0, dtype=self.dtype)])
        n = rows // self.tp
        return whole[self.rank * n : (self.rank + 1) * n].clone()

    def entrance(self, number: int, kind: str) -> Tensor:
        """The first feed-forward matrix; a gated one has this rank's gate on top of this rank's other half."""
        up = self.rows(f"blocks.{number}.mlp.up.{kind}")
        return (
            torch.cat([self.rows(f"blocks.{number}.mlp.gate.{kind}"), up]) if self.model.activation == "swiglu" else up
        )


def layer(cut: Cutter, number: int, style: str) -> dict[str, Tensor]:
    """One layer's tensors in the order of Megatron's modules."""
    model, block = cut.model, f"blocks.{number}"
    kinds = ["weight"] + (["bias"] if model.norm == "layernorm" else [])
    attention = ["weight"] + (["bias"] if attention_bias(model) else [])
    mlp = ["weight"] + (["bias"] if mlp_bias(model) else [])
    first = {kind: cut.same(f"{block}.attention_norm.{kind}") for kind in kinds}
    second = {kind: cut.same(f"{block}.mlp_norm.{kind}") for kind in kinds}
    qkv = {kind: cut.rows(f"{block}.attention.qkv.{kind}") for kind in attention}
    dense = {"weight": cut.columns(f"{block}.attention.output.weight")}
    if mlp_bias(model):
        dense["bias"] = cut.same(f"{block}.attention.output.bias")
    fc1 = {kind: cut.entrance(number, kind) for kind in mlp}
    fc2 = {
        kind: cut.columns(f"{block}.mlp.down.weight") if kind == "weight" else cut.same(f"{block}.mlp.down.bias")
        for kind in mlp
    }

    def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {prefix + kind: tensor for kind, tensor in tensors.items()}

    if style == "te":
        return {
            **under("self_attention.linear_proj.", dense),
            **under("self_attention.linear_qkv.layer_norm_", first),
            **under("self_attention.linear_qkv.", qkv),
            **under("mlp.linear_fc1.layer_norm_", second),
            **under("mlp.linear_fc1.", fc1),
            **under("mlp.linear_fc2.", fc2),
        }
    words = {
        "local": "linear_qkv linear_proj pre_mlp_layernorm linear_fc1 linear_fc2",
        "legacy": "query_key_value dense post_attention_layernorm dense_h_to_4h dense_4h_to_h",
    }[style].split()
    rooms = ("self_attention.", "self_attention.", "", "mlp.", "mlp.")
    names = [room + word for room, word in zip(rooms, words, strict=True)]
    parts = under("input_layernorm.", first)
    for name, tensors in zip(names, (qkv, dense, second, fc1, fc2), strict=True):
        parts |= under(f"{name}.", tensors)
    return parts


def chunk(cut: Cutter, layers: range, first: bool, last: bool, style: str) -> dict[str, Any]:
    """A model chunk as Megatron's state dictionaries have it."""
    model = cut.model
    blocks = {
        f"layers.{local}.{key}": value
        for local, number in enumerate(layers)
        for key, value in layer(cut, number, style).items()
    }
    kinds = ["weight"] + (["bias"] if model.norm == "layernorm" else [])
    final = {f"final_layernorm.{kind}": cut.same(f"head.norm.{kind}") for kind in kinds} if last else {}
    word = cut.vocabulary("embedding.word.weight")
    position = cut.same("embedding.position.weight") if model.position_embedding == "learned" else None
    head = cut.vocabulary("head.weight") if model.untie_embeddings_and_output_weights else None
    if style == "legacy":
        nested: dict[str, Any] = {"language_model": {}}
        if first:
            nested["language_model"]["embedding"] = {"word_embeddings": {"weight": word}}
            if position is not None:
                nested["language_model"]["embedding"]["position_embeddings"] = {"weight": position}
        nested["language_model"]["encoder"] = blocks | final
        if last and head is not None:
            nested["language_model"]["output_layer"] = {"weight": head}
        if last and not first and head is None:
            nested["word_embeddings_for_head"] = {"weight": word.clone()}
        return nested
    flat: dict[str, Any] = {}
    if first:
        flat["embedding.word_embeddings.weight"] = word
        if position is not None:
            flat["embedding.position_embeddings.weight"] = position
    flat |= {f"decoder.{key}": value for key, value in (blocks | final).items()}
    if style == "te":
        flat["decoder.layers.0.self_attention.core_attention._extra_state"] = None
        flat["decoder.layers.0.mlp.linear_fc1._extra_state"] = io.BytesIO(b"state")
        flat["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    if last and (head is not None or not first):
        flat["output_layer.weight"] = word.clone() if head is None else head
    return flat


def save_megatron(
    source: Source,
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    virtual: int = 1,
    style: str = "te",
    dtype: torch.dtype = torch.float32,
    version: float = 3.0,
    optimizer: bool = False,
    **more: Any,
) -> Path:
    """A folder with a tracker. Virtual stage v of stage p has the chunk v * pp + p.

    Returns the folder of the iteration.
    """
    model = source.model
    inside = folder / "iter_0000007"
    args = megatron_args(model, tp, pp, **more)
    for t, p in itertools.product(range(tp), range(pp)):
        parts = partial(_chunks, source, model, tp, t, [v * pp + p for v in range(virtual)], pp * virtual, style)
        state: dict[str, Any] = {
            "args": args,
            "checkpoint_version": version,
            "iteration": 7,
            "rng_state": [torch.zeros(3)],
        }
        models = parts("weight", dtype)
        state |= {"model": models[0]} if virtual == 1 else {f"model{v}": model for v, model in enumerate(models)}
        if optimizer:
            state["optimizer"] = _optimizer(
                *(parts(column, torch.float32) for column in ("weight", "exp_avg", "exp_avg_sq"))
            )
        path = inside / (f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}") / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return inside


def _chunks(
    source: Source,
    model: ModelConfig,
    tp: int,
    rank: int,
    numbers: list[int],
    count: int,
    style: str,
    column: str,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """These chunks of `count`."""
    cut = Cutter(lambda name: source.read(name, column), model, tp, rank, dtype)
    per = model.num_layers // count
    return [chunk(cut, range(c * per, (c + 1) * per), c == 0, c == count - 1, style) for c in numbers]


def _leaves(nested: dict[str, Any], before: str = "") -> list[tuple[str, Tensor]]:
    found = []
    for key, value in nested.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{before}{key}.")
        elif "_extra_state" not in key:
            found.append((f"{before}{key}", value))
    return found


def _optimizer(
    masters: list[dict[str, Any]], averages: list[dict[str, Any]], squares: list[dict[str, Any]]
) -> dict[str, Any]:
    """As Float16OptimizerWithFloat16Params writes it: numbers run over the groups, decaying parameters first."""
    flat = [[pair for part in parts for pair in _leaves(part)] for parts in (masters, averages, squares)]
    state, groups, kept, number = {}, [], [], 0
    for decays in (True, False):
        chosen = [
            i for i, (key, value) in enumerate(flat[0]) if (value.dim() != 1 and not key.endswith(".bias")) == decays
        ]
        numbers = list(range(number, number + len(chosen)))
        number += len(chosen)
        for n, i in zip(numbers, chosen, strict=True):
            state[n] = {"exp_avg": flat[1][i][1], "exp_avg_sq": flat[2][i][1]}
        groups.append({"params": numbers, "wd_mult": 1.0 if decays else 0.0, "lr_mult": 1.0, "step": 5})
        kept.append([flat[0][i][1] for i in chosen])
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
    return {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": kept, "grad_scaler": scaler}
