"""Checkpoints of other programs that claim what they do not have: one ConversionError with the file's name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megazero.convert.files.torch_file import read_torch_file
from megazero.convert.registry import open_source
from megazero.convert.source import ConversionError
from tests.fuzz import folders


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.checkpoint(tmp_path_factory.mktemp("hf"), "hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 3_000_000}, "num_layers 3000000 must be at most"),
        ({"n_head": 10**17}, "num_attention_heads 100000000000000000 must be at most"),
        ({"hidden_size": 10**15, "n_embed": 10**15}, "hidden_size 1000000000000000 must be at most"),
        ({"vocab_size": 2**40}, "vocab_size 1099511627776 must be at most"),
        ({"n_layer": [2]}, "n_layer"),
        ({"layer_norm_epsilon": {}}, "layer_norm_epsilon"),
    ],
)
def test_config_json(changes: dict[str, Any], message: str, hf: Path, tmp_path: Path) -> None:
    config = json.loads((hf / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    start = time.process_time()
    with pytest.raises(ConversionError, match=f"{tmp_path / 'config.json'}.*{message}"):
        open_source(tmp_path, "hf")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "adapter_config.json: r 0 must be"),
        ({"r": "x"}, "adapter_config.json: r 'x'"),
        ({"r": None}, "adapter_config.json: r None"),
        ({"r": 10**9}, "must be at most"),
        ({"lora_alpha": 0}, "lora_alpha 0 must be"),
        ({"lora_alpha": 1e308}, "must be more than 0 and at most"),
        ({"base_model_name_or_path": [1]}, r"\[1\] is no path"),
        ({"base_model_name_or_path": ""}, "is empty, and names no model"),
    ],
)
def test_adapter_config(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = folders.adapters(tmp_path)
    open_source(path).closing.close()
    config = json.loads((path / "adapter_config.json").read_text()) | changes
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=f"{path}.*{message}"):
        open_source(path)


def test_adapters_of_rank_0(tmp_path: Path) -> None:
    path = folders.adapters(tmp_path)
    layer = "base_model.model.transformer.h.0.self_attention.query_key_value"
    save_file(
        {f"{layer}.lora_A.weight": torch.ones(0, 8), f"{layer}.lora_B.weight": torch.ones(24, 0)},
        path / "adapter_model.safetensors",
    )
    with pytest.raises(ConversionError, match=r"adapter_model\.safetensors: .*lora_A\.weight is of rank 0"):
        open_source(path)
    save_file(
        {f"{layer}.lora_A.weight": torch.tensor(1.0), f"{layer}.lora_B.weight": torch.tensor(1.0)},
        path / "adapter_model.safetensors",
    )
    with pytest.raises(ConversionError, match="do not belong together"):
        open_source(path)


def test_adapters_beneath_themselves(tmp_path: Path) -> None:
    path = folders.adapters(tmp_path)
    config = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(path)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=r"beneath itself"):
        open_source(path)


def test_a_tensor_that_repeats_a_storage(tmp_path: Path) -> None:
    """Strides of 0 make 10^12 elements of one."""
    torch.save({"a": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "x.bin")
    with pytest.raises(
        ConversionError, match=r"x\.bin: a tensor of size \(1000000, 1000000\) repeats a storage of 1 elements"
    ):
        read_torch_file(tmp_path / "x.bin")
    torch.save({"a": torch.arange(5).expand(7, 5)}, tmp_path / "x.bin")
    assert read_torch_file(tmp_path / "x.bin")["a"].shape == (7, 5)


@pytest.mark.parametrize(
    ("name", "value"), [("num_layers", 3_000_000), ("num_attention_heads", 10**17), ("num_layers", "x")]
)
@pytest.mark.parametrize("format", ["megatron", "consolidated"])
def test_arguments(format: str, name: str, value: Any, tmp_path: Path) -> None:
    path = folders.checkpoint(tmp_path, format)
    if format == "megatron":
        (file,) = path.rglob("model_optim_rng.pt")
        args = json.loads(folders.arguments_of(file)) | {name: value}
        file.write_bytes(folders.with_arguments(file)(json.dumps(args).encode()))
    else:
        file = path / "megatron_args.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    start = time.process_time()
    with pytest.raises(ConversionError, match=f"{path}.*{name}"):
        open_source(path)
    assert time.process_time() - start < 3
