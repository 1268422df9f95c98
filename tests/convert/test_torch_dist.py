"""Megatron-LM's torch_dist checkpoints: saved by torch.distributed.checkpoint itself, from tensors as Megatron-core
shards them.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.config.derive import attention_bias, mlp_bias
from megazero.config.schema import ModelConfig
from megazero.convert.files.torch_dist import DistributedCheckpoint
from megazero.convert.megatron.registered import open_megatron
from megazero.convert.registry import recognise
from megazero.convert.source import ConversionError, Source
from tests.convert.megatron_files import megatron_args, padded
from tests.convert.sources import made
from tests.convert.test_megatron import GPT, LLAMA, MODELS, same


def core_tensors(source: Source, column: str = "weight", *, stacked: bool, fused: bool = True) -> dict[str, Tensor]:
    """Global tensors as Megatron-core names them. fused: norms inside the linear layers behind them."""
    model = source.model

    def read(name: str) -> Tensor:
        return source.read(name, column)

    def table(name: str) -> Tensor:
        whole = read(name)
        return torch.cat([whole, torch.full((padded(model, 1) - whole.shape[0], whole.shape[1]), 7.0)])

    kinds = ["weight"] + (["bias"] if model.norm == "layernorm" else [])
    found = {"embedding.word_embeddings.weight": table("embedding.word.weight")}
    if model.position_embedding == "learned":
        found["embedding.position_embeddings.weight"] = read("embedding.position.weight")
    found |= {f"decoder.final_layernorm.{kind}": read(f"head.norm.{kind}") for kind in kinds}
    if model.untie_embeddings_and_output_weights:
        found["output_layer.weight"] = table("head.weight")
    linear = {
        "self_attention.linear_qkv": "attention.qkv",
        "self_attention.linear_proj": "attention.output",
        "mlp.linear_fc2": "mlp.down",
    }
    norms = {"self_attention.linear_qkv.layer_norm_": "attention_norm", "mlp.linear_fc1.layer_norm_": "mlp_norm"}
    if not fused:
        norms = {"input_layernorm.": "attention_norm", "pre_mlp_layernorm.": "mlp_norm"}
    for name, ours in {**linear, "mlp.linear_fc1": "mlp.up"}.items():
        biased = attention_bias(model) if "attention" in ours else mlp_bias(model)
        for kind in ["weight"] + (["bias"] if biased else []):
            layers = []
            for number in range(model.num_layers):
                value = read(f"blocks.{number}.{ours}.{kind}")
                if ours == "mlp.up" and model.activation == "swiglu":
                    value = torch.cat([read(f"blocks.{number}.mlp.gate.{kind}"), value])
                layers.append(value)
            found |= _layers(f"{name}.{kind}", layers, stacked)
    for prefix, ours in norms.items():
        for kind in kinds:
            found |= _layers(
                f"{prefix}{kind}", [read(f"blocks.{n}.{ours}.{kind}") for n in range(model.num_layers)], stacked
            )
    return found


def _layers(name: str, values: list[Tensor], stacked: bool) -> dict[str, Tensor]:
    if stacked:
        return {f"decoder.layers.{name}": torch.stack(values)}
    return {f"decoder.layers.{number}.{name}": value for number, value in enumerate(values)}


def cuts_of(tensors: dict[str, Tensor], tp: int, stacked: bool, gated: bool) -> dict[str, tuple[int, ...]]:
    """Shards of tp ranks; of a stack one for each layer; of a gated layer's first matrix each rank's gate and other
    half.
    """
    found = {}
    for name, value in tensors.items():
        axes = [1] * value.dim()
        first = 1 if stacked and name.startswith("decoder.layers.") else 0
        if first:
            axes[0] = value.shape[0]
        if "linear_fc1.weight" in name or "linear_fc1.bias" in name:
            axes[first] = tp * (2 if gated else 1)
        elif (
            "linear_qkv.weight" in name
            or "linear_qkv.bias" in name
            or "embeddings.weight" in name
            or "output_layer" in name
        ):
            axes[first] = tp if "position" not in name else 1
        elif "linear_proj.weight" in name or "linear_fc2.weight" in name:
            axes[first + 1] = tp
        found[name] = tuple(axes)
    return found


def flat_shards(value: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """As Megatron-core stores what the distributed optimizer holds flat: [cuts of each axis, elements of a shard]."""
    found = torch.empty(*cuts, value.numel() // int(torch.tensor(cuts).prod()))
    for at in product(*map(range, cuts)):
        piece = value
        for axis, (index, cut) in enumerate(zip(at, cuts, strict=True)):
            piece = piece.chunk(cut, axis)[index]
        found[at] = piece.reshape(-1)
    return found


def save_dist(
    source: Source,
    folder: Path,
    *,
    tp: int = 2,
    stacked: bool = True,
    fused: bool = True,
    whole: bool = False,
    optimizer: str = "",
    dtype: torch.dtype = torch.float32,
    extra: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """optimizer: "" none, "whole" by name, "flat" by name in flat shards, "buckets" as dp_reshardable has it. whole:
    every tensor in one piece.
    """
    from tests.convert.distributed import save

    inside = folder / "iter_0000007"
    inside.mkdir(parents=True)
    gated = source.model.activation == "swiglu"
    tensors = {name: value.to(dtype) for name, value in core_tensors(source, stacked=stacked, fused=fused).items()}
    cuts = {} if whole else cuts_of(tensors, tp, stacked, gated)
    if optimizer in ("whole", "flat"):
        for column, state in {"weight": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.items():
            for name, value in core_tensors(source, column, stacked=stacked, fused=fused).items():
                key = f"optimizer.state.{state}.{name}"
                shards = cuts_of({name: value}, tp, stacked, gated)[name]
                tensors[key] = value if optimizer == "whole" else flat_shards(value, shards)
                if not whole:
                    cuts[key] = shards if optimizer == "whole" else (*shards, 1)
    if optimizer == "buckets":
        tensors[
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
        ] = torch.zeros(64)
    objects = {
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_4": b"",
        "rng_state/shard_0.0_1.1": [1, 2],
    }
    save({**tensors, **objects, **(extra or {})}, inside, cuts)
    common = {
        "args": megatron_args(source.model, tp, 1, padded_vocab_size=padded(source.model, 1), **more),
        "checkpoint_version": 3.0,
        "iteration": 7,
    }
    common["optimizer"] = {
        "optimizer": {"param_groups": [{"step": 5, "lr": 0.1}]},
        "param_state_sharding_type": "fully_sharded_model_space",
    }
    torch.save(common, inside / "common.pt")
    (inside / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"})
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return inside


@pytest.mark.few(cases=3)
@pytest.mark.parametrize(
    ("stacked", "fused", "whole"), [(True, True, False), (False, False, False), (True, False, True)]
)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_weights(tmp_path: Path, model: ModelConfig, stacked: bool, fused: bool, whole: bool) -> None:
    source = made(model)
    save_dist(source, tmp_path, stacked=stacked, fused=fused, whole=whole)
    assert recognise(tmp_path) == recognise(tmp_path / "iter_0000007") == "megatron"
    with open_megatron(tmp_path) as opened:
        same(opened, source)
        assert opened.model == model and opened.columns == ("weight",)
        assert (opened.position.iteration, opened.position.consumed_samples, opened.position.optimizer_steps) == (
            7,
            84,
            5.0,
        )
        assert (
            any("_extra_state" in key for key in opened.report.unused)
            and "rng_state/shard_0.0_1.1" in opened.report.unused
        )


@pytest.mark.few(cases=1)
@pytest.mark.parametrize(
    ("model", "stacked", "optimizer"),
    [(GPT, True, "flat"), (LLAMA, True, "whole"), (LLAMA, True, "flat"), (GPT, False, "flat")],
    ids=["gpt-flat", "llama-whole", "llama-flat", "gpt-apart-flat"],
)
def test_the_optimizers_state_by_name(tmp_path: Path, model: ModelConfig, stacked: bool, optimizer: str) -> None:
    source = made(model, moments=True)
    save_dist(source, tmp_path, stacked=stacked, optimizer=optimizer, dtype=torch.bfloat16)
    with open_megatron(tmp_path) as opened:
        assert opened.columns == ("weight", "exp_avg", "exp_avg_sq") and opened.run.optimizer.precision == "bf16"
        same(opened, source, "weight", "exp_avg", "exp_avg_sq")


def test_buckets_of_the_optimizer_are_reported(tmp_path: Path) -> None:
    source = made(GPT)
    save_dist(source, tmp_path, optimizer="buckets", dtype=torch.bfloat16)
    with open_megatron(tmp_path) as opened:
        assert opened.columns == ("weight",)
        (why,) = [why for key, why in opened.report.unused.items() if key.startswith("optimizer.distributed")]
        assert "not carried over" in why
        same(opened, source, dtype=torch.bfloat16)


def test_gate_and_up_under_names_of_their_own(tmp_path: Path) -> None:
    """`singleton_local_shards`: mlp.linear_fc1.weight_w and _v."""
    from tests.convert.distributed import save

    source = made(LLAMA)
    inside = save_dist(source, tmp_path)
    for file in inside.glob("*.distcp"):
        file.unlink()
    tensors = core_tensors(source, stacked=True)
    gate, up = tensors.pop("decoder.layers.mlp.linear_fc1.weight").chunk(2, 1)
    tensors |= {
        "decoder.layers.mlp.linear_fc1.weight_w": gate.contiguous(),
        "decoder.layers.mlp.linear_fc1.weight_v": up.contiguous(),
    }
    save(tensors, inside, {})
    with open_megatron(tmp_path) as opened:
        same(opened, source)


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stack in one piece a layer's bytes, of a stack in pieces a layer's pieces."""
    import megazero.convert.files.torch_file as torch_file

    flat, copied = torch_file._flat, []

    def counted(data: memoryview, dtype: torch.dtype) -> Tensor:
        copied.append(len(data))
        return flat(data, dtype)

    monkeypatch.setattr(torch_file, "_flat", counted)
    for whole in (True, False):
        source = made(GPT)
        save_dist(source, tmp_path / str(whole), whole=whole)
        with open_megatron(tmp_path / str(whole)) as opened:
            copied.clear()
            assert torch.equal(opened.read("blocks.2.mlp.up.weight"), source.read("blocks.2.mlp.up.weight"))
            assert sum(copied) == 96 * 24 * 4


REFUSED = {
    "layers": ({"num_layers": 5}, r"\[4, 96, 24\]|is of 4 layers, num_layers is 5"),
    "width": ({"hidden_size": 32, "kv_channels": 6}, r"self_attention\.linear_proj\.weight has shape \[4, 24, 24\]"),
    "surplus": (
        {"extra": {"decoder.layers.self_attention.q_layernorm.weight": torch.ones(4, 6)}},
        "q_layernorm.weight is a weight that",
    ),
    "experts": ({"num_experts": 8}, "num_experts 8 is not supported"),
}


@pytest.mark.parametrize(("changed", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    save_dist(made(GPT), tmp_path, **changed)
    with pytest.raises(ConversionError, match=said):
        open_megatron(tmp_path)


def test_a_folder_that_is_not_whole(tmp_path: Path) -> None:
    inside = save_dist(made(GPT), tmp_path)
    (file,) = inside.glob("*.distcp")
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(ConversionError, match=r"__0_0\.distcp is missing"):
        open_megatron(tmp_path)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConversionError, match=r"__0_0\.distcp has \d+ bytes, a piece of .* is said to end at"):
        open_megatron(tmp_path)
    (inside / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ConversionError, match="sharded_backend 'zarr' is not read"):
        open_megatron(tmp_path)


def test_metadata_runs_nothing(tmp_path: Path) -> None:
    inside = save_dist(made(GPT), tmp_path)

    class Bad:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    (inside / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Bad()}))
    with pytest.raises(ConversionError, match=r"posix\.system|os\.system|nt\.system"):
        open_megatron(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_any_box_of_pieces(tmp_path: Path) -> None:
    from tests.convert.distributed import save

    value = torch.arange(6 * 8 * 4).view(6, 8, 4)
    save({"x": value, "one": torch.tensor(3.5)}, tmp_path, {"x": (3, 2, 4)})
    opened = DistributedCheckpoint(tmp_path)
    assert len(opened.tensors["x"].pieces) == 24
    for box in [((0, 6), (0, 8), (0, 4)), ((1, 5), (3, 5), (1, 3)), ((2, 3), (4, 8), (3, 4))]:
        assert torch.equal(opened.read("x", box), value[tuple(slice(*sides) for sides in box)])
    assert opened.read("one").item() == 3.5
    stored = opened.tensors["x"]
    opened.tensors["x"] = replace(stored, pieces=stored.pieces[1:])
    with pytest.raises(ConversionError, match="do not cover"):
        opened.read("x")
