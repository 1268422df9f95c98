"""Checkpoints in the layout in which BLOOM was trained, built from the format's description without any code of the
converters.

Tensors are cut here, one by one, from global ones under our names. Stub classes replace those of DeepSpeed and Megatron
while torch.save writes their names.
"""

from __future__ import annotations

import argparse
import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.config.schema import ModelConfig

Globals = Mapping[str, Mapping[str, Tensor]]
"""column -> name -> global tensor."""

ROWS, COLUMNS, SAME = "rows", "columns", "same"
BLOCK = [
    ("input_layernorm.weight", "attention_norm.weight", SAME),
    ("input_layernorm.bias", "attention_norm.bias", SAME),
    ("self_attention.query_key_value.weight", "attention.qkv.weight", ROWS),
    ("self_attention.query_key_value.bias", "attention.qkv.bias", ROWS),
    ("self_attention.dense.weight", "attention.output.weight", COLUMNS),
    ("self_attention.dense.bias", "attention.output.bias", SAME),
    ("post_attention_layernorm.weight", "mlp_norm.weight", SAME),
    ("post_attention_layernorm.bias", "mlp_norm.bias", SAME),
    ("mlp.dense_h_to_4h.weight", "mlp.up.weight", ROWS),
    ("mlp.dense_h_to_4h.bias", "mlp.up.bias", ROWS),
    ("mlp.dense_4h_to_h.weight", "mlp.down.weight", COLUMNS),
    ("mlp.dense_4h_to_h.bias", "mlp.down.bias", SAME),
]
EMBEDDING = [
    ("word_embeddings.weight", "embedding.word.weight", ROWS),
    ("word_embeddings.norm.weight", "embedding.norm.weight", SAME),
    ("word_embeddings.norm.bias", "embedding.norm.bias", SAME),
    ("position_embeddings.weight", "embedding.position.weight", SAME),
]
FINAL = [("weight", "head.norm.weight", SAME), ("bias", "head.norm.bias", SAME)]


def class_of(module: str, name: str, base: type = object, **members: Any) -> type:
    return type(name, (base,), {"__module__": module, "__qualname__": name, **members})


@dataclass
class Foreign:
    """Classes that are DeepSpeed's and Megatron's by name."""

    address: type
    scaler: type
    stage: Any
    position: Any


@contextmanager
def foreign() -> Iterator[Foreign]:
    """A context with modules of these names, because torch.save checks that a class can be imported by its name."""
    stages: Any = enum.IntEnum("stages", {"optimizer_states": 1, "gradients": 2})
    positions: Any = enum.Enum("positions", {"rotary": 1, "absolute": 2, "alibi": 3})
    stages.__module__, stages.__qualname__ = "deepspeed.runtime.zero.config", "ZeroStageEnum"
    positions.__module__, positions.__qualname__ = "megatron.enums", "PositionEmbeddingType"
    address = class_of("deepspeed.utils.tensor_fragment", "fragment_address")
    found = Foreign(address, class_of("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"), stages, positions)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (found.address, found.scaler, found.stage, found.position):
            parts = kind.__module__.split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                patch.setitem(sys.modules, name, types.ModuleType(name))
            setattr(sys.modules[kind.__module__], kind.__qualname__, kind)
        yield found


@dataclass
class Layout:
    """tp, dp, and how many blocks each pipeline stage has. rows: of the padded vocabulary."""

    tp: int = 1
    stages: tuple[int, ...] = (2,)
    dp: int = 1
    rows: int = 128

    @property
    def blocks(self) -> list[range]:
        ends = [sum(self.stages[: i + 1]) for i in range(len(self.stages))]
        return [range(end - count, end) for end, count in zip(ends, self.stages, strict=True)]


def piece(whole: Tensor, how: str, layout: Layout, t: int, table: bool = False) -> Tensor:
    """What tp rank t holds of a global tensor. Rows that pad the vocabulary hold what training left there: no zeros."""
    if table:
        whole = torch.cat([whole, torch.full((layout.rows - whole.shape[0], *whole.shape[1:]), 3.0, dtype=whole.dtype)])
    if how == SAME:
        return whole.clone()
    axis = 0 if how == ROWS else 1
    size = whole.shape[axis] // layout.tp
    return whole.narrow(axis, t * size, size).clone()


def layer_tensors(
    values: Mapping[str, Tensor], model: ModelConfig, layout: Layout, t: int
) -> dict[int, dict[str, Tensor]]:
    """layer -> key -> tensor of tp rank t, of the whole model."""
    layers: dict[int, dict[str, Tensor]] = {1: {}}
    for key, name, how in EMBEDDING:
        if name in values:
            layers[1][key] = piece(values[name], how, layout, t, table=name == "embedding.word.weight")
    for number in range(model.num_layers):
        layers[number + 3] = {key: piece(values[f"blocks.{number}.{name}"], how, layout, t) for key, name, how in BLOCK}
    layers[model.num_layers + 4] = {key: piece(values[name], how, layout, t) for key, name, how in FINAL}
    if model.untie_embeddings_and_output_weights:
        layers[model.num_layers + 5] = {"lm_head.weight": piece(values["head.weight"], ROWS, layout, t, table=True)}
    return layers


def stage_parameters(
    layers: Mapping[int, Mapping[str, Tensor]], model: ModelConfig, layout: Layout, stage: int
) -> dict[str, Tensor]:
    """Parameters of a stage by the names in the optimizer's files, in the pipeline's order.

    A tied embedding is on the first and last stage.
    """
    tied = not model.untie_embeddings_and_output_weights
    first, last = stage == 0, stage == len(layout.stages) - 1
    found: dict[str, Tensor] = {}
    if first or (last and tied):
        prefix = "tied_modules.embed." if tied else "1."
        found |= {prefix + key: tensor for key, tensor in layers[1].items()}
    for number in layout.blocks[stage]:
        found |= {f"{number + 3}.{key}": tensor for key, tensor in layers[number + 3].items()}
    if last:
        behind = [number for number in layers if number > model.num_layers + 2]
        found |= {f"{number}.{key}": tensor for number in behind for key, tensor in layers[number].items()}
    return found


def groups_of(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Weights decay, norms and biases do not."""
    quiet = [name for name, tensor in parameters.items() if tensor.dim() == 1]
    return [[name for name in parameters if name not in quiet], quiet]


def partitions(flat: Tensor, dp: int) -> tuple[list[Tensor], int]:
    """A group's vector, padded to a multiple of 2 dp and cut; with the padding's length."""
    padding = -flat.numel() % (2 * dp)
    whole = torch.cat([flat, torch.full((padding,), 9.0, dtype=flat.dtype)])
    return [part.clone() for part in whole.chunk(dp)], padding


def mapping(
    names: Sequence[str], parameters: Mapping[str, Tensor], size: int, partition: int, address: type
) -> OrderedDict[str, Any]:
    """What a partition of this size has of each parameter."""
    found: OrderedDict[str, Any] = OrderedDict()
    at = 0
    for name in names:
        start, stop = max(at, partition * size), min(at + parameters[name].numel(), (partition + 1) * size)
        if start < stop:
            found[name] = address()
            found[name].numel, found[name].start = stop - start, start - partition * size
        at += parameters[name].numel()
    return found


def bloom_args(model: ModelConfig, layout: Layout, position: Any, **more: Any) -> argparse.Namespace:
    kinds = {"alibi": "alibi", "learned": "absolute", "rotary": "rotary"}
    shared = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")
    said: dict[str, Any] = {name: getattr(model, name) for name in (*shared, "untie_embeddings_and_output_weights")}
    said |= {
        "ffn_hidden_size": 4 * model.hidden_size,
        "kv_channels": model.hidden_size // model.num_attention_heads,
        "padded_vocab_size": layout.rows,
        "make_vocab_size_divisible_by": 128,
        "max_position_embeddings": model.seq_length,
        "position_embedding_type": position[kinds[model.position_embedding]],
        "embed_layernorm": model.embedding_layernorm,
        "layernorm_epsilon": model.norm_epsilon,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": len(layout.stages),
        "consumed_train_tokens": 32 * model.seq_length,
    }
    said |= {"params_dtype": torch.bfloat16, "bf16": True, "fp16": False, "iteration": 4, "consumed_train_samples": 32}
    said |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.02, "glu_activation": None}
    said |= {"bias_gelu_fusion": True, "openai_gelu": False, "kd": False}
    return argparse.Namespace(**said | {"apply_residual_connection_post_layernorm": False} | more)


def save_bloom(
    values: Globals,
    model: ModelConfig,
    folder: Path,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.bfloat16,
    mappings: bool = True,
    args: bool | dict[str, Any] = True,
    spoil: dict[tuple[str, int], float] | None = None,
    behind: float = 0.0,
    steps: Any = 4,
    **more: Any,
) -> Path:
    """A folder with `latest`; returns the checkpoint's own. Without moments in `values` there are no optimizer files.

    spoil: (our name, tp rank) -> what is added to that rank's replica, in every column. behind: what is added to the
    last stage's copy of the tied embedding's optimizer columns. args: False for none, a dictionary instead of a
    namespace
    """
    inside = folder / "global_step4"
    inside.mkdir(parents=True)
    (folder / "latest").write_text("global_step4")
    spoilt = [
        {name: value + (spoil or {}).get((name, t), 0.0) for name, value in values["weight"].items()}
        for t in range(layout.tp)
    ]
    with foreign() as classes:
        for t in range(layout.tp):
            for number, tensors in layer_tensors(spoilt[t], model, layout, t).items():
                content = OrderedDict((key, tensor.to(dtype)) for key, tensor in tensors.items())
                torch.save(content, inside / f"layer_{number:02d}-model_{t:02d}-model_states.pt")
        for stage in range(len(layout.stages)):
            for t in range(layout.tp):
                held = layer_tensors(spoilt[t], model, layout, t)
                parameters = stage_parameters(held, model, layout, stage)
                rank = stage * layout.tp + t
                state = _model_state(model, layout, classes, parameters, args, more)
                torch.save(state, inside / f"mp_rank_{rank:02d}_model_states.pt")
                if "exp_avg" in values:
                    columns = {"weight": parameters}
                    for column in ("exp_avg", "exp_avg_sq"):
                        moved = {
                            name: value + (spoil or {}).get((name, t), 0.0) for name, value in values[column].items()
                        }
                        columns[column] = stage_parameters(layer_tensors(moved, model, layout, t), model, layout, stage)
                    if behind and stage == len(layout.stages) - 1:
                        for named in columns.values():
                            named |= {
                                name: tensor + behind for name, tensor in named.items() if name.startswith("tied")
                            }
                    _save_optimizer(inside, columns, layout, rank, classes, dtype, mappings, steps)
    return inside


def _model_state(
    model: ModelConfig, layout: Layout, classes: Foreign, parameters: Mapping[str, Tensor], args: Any, more: Any
) -> dict[str, Any]:
    said = bloom_args(model, layout, classes.position, **more)
    shapes = [OrderedDict((name, parameters[name].shape) for name in names) for names in groups_of(parameters)]
    state: dict[str, Any] = {"module": None, "buffer_names": [], "optimizer": None, "param_shapes": shapes}
    state |= {"lr_scheduler": {"max_lr": 1e-3, "num_steps": 32}, "ds_config": "ds_config.json", "ds_version": "0.6.6"}
    state |= {"global_steps": 4, "skipped_steps": 0, "iteration": 4, "tokens": 32 * model.seq_length}
    state |= {"dp_world_size": layout.dp, "mp_world_size": layout.tp * len(layout.stages), "checkpoint_version": 3.0}
    state |= {"random_rng_state": (3, (1, 2, 3), None), "torch_rng_state": torch.get_rng_state()}
    if args is not False:
        state["args"] = said if args is True else args
    return state


def _save_optimizer(
    inside: Path,
    columns: Globals,
    layout: Layout,
    rank: int,
    classes: Foreign,
    dtype: torch.dtype,
    mappings: bool,
    n: Any,
) -> None:
    """n: the number of steps, of each moment."""
    parameters = columns["weight"]
    groups = groups_of(parameters)
    flat = {
        column: [
            partitions(torch.cat([named[name].float().reshape(-1) for name in names]), layout.dp) for names in groups
        ]
        for column, named in columns.items()
    }
    for d in range(layout.dp):
        last = d == layout.dp - 1
        moments = [{column: flat[column][g][0][d] for column in ("exp_avg", "exp_avg_sq")} for g in range(len(groups))]
        base = {
            "state": {g: {"step": n, **moments[g]} for g in range(len(groups))},
            "param_groups": [
                {"weight_decay": decay, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "params": [g]}
                for g, decay in enumerate((0.1, 0.0))
            ],
        }
        state: dict[str, Any] = {
            "clip_grad": 1.0,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [flat["weight"][g][0][d] for g in range(len(groups))],
            "group_paddings": [flat["weight"][g][1] if last else 0 for g in range(len(groups))],
            "partition_count": layout.dp,
            "ds_version": "0.6.6",
        }
        if mappings:
            sizes = [flat["weight"][g][0][0].numel() for g in range(len(groups))]
            state["param_slice_mappings"] = [
                mapping(names, parameters, sizes[g], d, classes.address) for g, names in enumerate(groups)
            ]
        prefix = "bf16_"
        if dtype == torch.float16:
            prefix = ""
            scaler = classes.scaler()
            scaler.__dict__ = {"cur_scale": 4096.0, "cur_iter": 30, "last_overflow_iter": 5}
            scaler.__dict__ |= {"scale_window": 10, "delayed_shift": 2, "cur_hysteresis": 1}
            state |= {"loss_scaler": scaler, "partition_count": [layout.dp] * 2}
            state["zero_stage"] = classes.stage.optimizer_states
            state["single_partition_of_fp32_groups"] = [
                part[: part.numel() - padding]
                for part, padding in zip(state["single_partition_of_fp32_groups"], state["group_paddings"], strict=True)
            ]
        torch.save(
            {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.6.6"},
            inside / f"{prefix}zero_pp_rank_{d}_mp_rank_{rank:02d}_optim_states.pt",
        )
