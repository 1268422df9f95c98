"""transformers -> megazero -> Hugging Face: every tensor bit for bit, config.json as it was, and transformers opens it
without a word.
"""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.hf.writer import write_hf
from megazero.convert.registry import format_table, open_source
from tests.convert.hf_models import CASES, Case, prompts, random_model, saved

DTYPES = cycle([torch.float32, torch.bfloat16, torch.float16, torch.float64])
TRIPS = [
    pytest.param(case, dtype, id=f"{name}, {dtype}") for (name, case), dtype in zip(CASES.items(), DTYPES, strict=False)
]
TRIPS += [
    pytest.param(CASES[name], torch.bfloat16, id=f"{name}, bf16 too")
    for name in ("gpt2, inner width", "llama, grouped", "opt")
]


def nothing(count: int) -> None:
    pass


def to(kind: str, source: Path, target: Path, wanted: TargetOptions | None = None) -> Path:
    with open_source(source) as opened:
        convert(opened, format_table()[kind], target, wanted or TargetOptions(), lambda line: None)
    return target


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def opened_by_transformers(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(told.values()), told
    return model


def same_tensors(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert mine[key].dtype == tensor.dtype and mine[key].shape == tensor.shape, key
        assert torch.equal(mine[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.few(cases=3)
@pytest.mark.parametrize(("case", "dtype"), TRIPS)
def test_bit_for_bit(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path / "theirs", dtype)
    native = to("megazero", theirs, tmp_path / "megazero")
    mine = to("hf", native, tmp_path / "mine")
    same_tensors(tensors_of(mine), tensors_of(theirs))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((mine / name).read_text()) == json.loads((theirs / name).read_text())
    model, expected = opened_by_transformers(mine), opened_by_transformers(theirs)
    assert model.dtype == dtype and type(model) is type(expected)
    with torch.no_grad():  # in memory of their own: how BLAS adds depends on where a mapped file has a matrix
        assert torch.equal(deepcopy(model)(prompts()).logits, deepcopy(expected)(prompts()).logits)


@pytest.mark.parametrize("name", ["bloom, 6 heads, untied", "gpt2, inner width", "llama, grouped", "opt"])
def test_shards(name: str, tmp_path: Path) -> None:
    """Read from many files and written into many: no file holds more than was asked for, unless it is one tensor."""
    theirs = saved(CASES[name], tmp_path / "theirs", max_shard_size="40KB")
    assert (theirs / "model.safetensors.index.json").is_file()
    with open_source(theirs) as source:
        (tmp_path / "mine").mkdir()
        write_hf(source, tmp_path / "mine", TargetOptions(), nothing, shard_bytes=30_000)
        assert source.report.mapped and not source.report.unused
    mine = tmp_path / "mine"
    same_tensors(tensors_of(mine), tensors_of(theirs))
    index = json.loads((mine / "model.safetensors.index.json").read_text())
    files = sorted(mine.glob("model-*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(theirs).values())
    assert all(
        sum(tensor.nbytes for tensor in load_file(file).values()) <= 30_000 or len(load_file(file)) == 1
        for file in files
    )
    opened_by_transformers(mine)


def torch_files(
    case: Case, folder: Path, *, shards: int, prefix: bool, extra: dict[str, torch.Tensor] | None = None
) -> Path:
    """pytorch_model.bin, as versions before safetensors wrote it: every key of the state dict, a tied
    head among them.
    """
    model = random_model(case)
    folder.mkdir()
    model.config.save_pretrained(folder)
    state = dict(model.state_dict()) | (extra or {})
    if not prefix:
        state = {key.removeprefix("transformer.").removeprefix("model."): value for key, value in state.items()}
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    weight_map = {key: f"pytorch_model-{i % shards + 1:05d}-of-{shards:05d}.bin" for i, key in enumerate(state)}
    for file in set(weight_map.values()):
        torch.save({key: value for key, value in state.items() if weight_map[key] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.few(cases=4)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("name", ["bloom, 12 heads", "gpt2, inner width", "llama, grouped", "opt"])
def test_torch_files(name: str, prefix: bool, shards: int, tmp_path: Path) -> None:
    """With and without prefix; buffers and a tied head are told as unused, each with its reason."""
    buffers = {
        "gpt2": {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24).bool(),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        },
        "llama": {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)},
    }.get(CASES[name].kind, {})
    folder = torch_files(CASES[name], tmp_path / "theirs", shards=shards, prefix=prefix, extra=buffers)
    with open_source(folder) as source:
        unused = source.report.unused
        tied = [] if CASES[name].kind == "llama" else ["lm_head.weight"]
        bare = [key if prefix else key.removeprefix("transformer.").removeprefix("model.") for key in buffers]
        assert sorted(unused) == sorted(tied + bare)
        assert all("follow from" in unused[key] or "follows from" in unused[key] for key in bare)
        assert all("tied to the embedding" in unused[key] for key in tied)
    same_tensors(tensors_of(to("hf", folder, tmp_path / "mine")), tensors_of(saved(CASES[name], tmp_path / "expected")))


def test_other_dtypes_and_overflow(tmp_path: Path) -> None:
    case = CASES["opt"]
    theirs = saved(case, tmp_path / "theirs")
    mine = to("hf", theirs, tmp_path / "bf16", TargetOptions(dtype=torch.bfloat16))
    same_tensors(tensors_of(mine), {key: tensor.bfloat16() for key, tensor in tensors_of(theirs).items()})
    assert json.loads((mine / "config.json").read_text())["dtype"] == "bfloat16"
    assert opened_by_transformers(mine).dtype == torch.bfloat16
    model = random_model(case)
    model.model.decoder.layers[1].fc1.weight.data[3, 4] = 7e4
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(ValueError, match=r"layers\.1\.fc1\.weight holds 70000, and torch\.float16 ends at 65504"):
        to("hf", tmp_path / "large", tmp_path / "fp16", TargetOptions(dtype=torch.float16))
    assert not (tmp_path / "fp16").exists()
