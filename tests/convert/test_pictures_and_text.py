"""Gemma 3 of pictures and text: its language model is read from either layout of files, has the logits of
`transformers` in float64, and is written as a language model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.config.layers.kinds import layers
from megazero.config.presets import preset
from megazero.config.schema import ModelConfig
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.hf.config import read_config
from megazero.convert.hf.language_part import language_config
from megazero.convert.registry import format_table, open_source
from megazero.convert.source import ConversionError
from megazero.data.progress import silent
from megazero.mpu.grid import single_process_grid
from tests.convert.hf_models import CASES, prompts, spread
from tests.convert.hf_ranks import answer
from tests.convert.test_hf_round_trip import opened_by_transformers
from tests.parity.float64 import in_float64

WHERE = Path("there/config.json")
PICTURES = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4,
    "image_token_index": 92,
}


def whole_model() -> Any:
    """Random values everywhere, of the parts for pictures too."""
    transformers = pytest.importorskip("transformers")
    text = {**CASES["gemma 3"].config, "model_type": "gemma3_text"}
    config = transformers.AutoConfig.for_model("gemma3", text_config=text, eos_token_id=[7, 9], **PICTURES)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    spread(model)
    return model


def their_logits() -> torch.Tensor:
    """[b, s, v] of the whole model, in float64, for texts without a picture."""
    transformers = pytest.importorskip("transformers")
    model = whole_model()
    with in_float64(), torch.no_grad():
        wide = transformers.Gemma3ForConditionalGeneration._from_config(model.config, attn_implementation="eager")
        wide.double().eval().load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
        logits = wide(prompts()).logits
    assert logits.dtype == torch.float64
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As released, and as `save_pretrained` writes it: language_model.model.*"""
    made = tmp_path_factory.mktemp("pictures") / "model"
    whole_model().save_pretrained(made)
    return made


def with_keys_of_the_program(folder: Path, target: Path) -> Path:
    """The same under the keys that `transformers` has in memory: model.language_model.*"""
    target.mkdir()
    renamed = {
        f"model.{key}".replace("model.language_model.model.", "model.language_model."): tensor
        for key, tensor in load_file(folder / "model.safetensors").items()
    }
    assert renamed.keys() | {"lm_head.weight"} == whole_model().state_dict().keys()
    save_file(renamed, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("layout", ["of files", "of the program"])
def test_logits_are_those_of_the_whole_model(layout: str, folder: Path, tmp_path: Path) -> None:
    path = folder if layout == "of files" else with_keys_of_the_program(folder, tmp_path / "model")
    logits, _ = answer(str(path), single_process_grid("cpu"), prompts(), 1)
    expected = their_logits()
    assert logits is not None
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-12
    others = sum("language_model" not in key for key in load_file(path / "model.safetensors"))
    with open_source(path) as source:
        (note,) = source.report.notes
        assert list(source.report.unused.values()) == ["no part of the language model"] * others
    assert note == (
        "a gemma3 model of pictures and text, whose language model alone is read; "
        f"{others} tensors of multi_modal_projector, vision_tower are left out"
    )


def test_it_is_written_as_a_language_model(folder: Path, tmp_path: Path) -> None:
    for path, format in (("native", "megazero"), ("mine", "hf")):
        with open_source(folder if path == "native" else tmp_path / "native") as source:
            convert(source, format_table()[format], tmp_path / path, TargetOptions(), silent)
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert not PICTURES.keys() & config.keys() and "text_config" not in config
    assert json.loads((tmp_path / "mine" / "generation_config.json").read_text())["eos_token_id"] == [7, 9]
    tensors = load_file(folder / "model.safetensors")
    written = load_file(tmp_path / "mine" / "model.safetensors")
    begin = "language_model."
    assert written.keys() == {key.removeprefix(begin) for key in tensors if key.startswith(begin)}
    assert all(torch.equal(tensor, tensors[begin + key]) for key, tensor in written.items())
    with torch.no_grad():
        text, whole = (model(prompts()).logits for model in (opened_by_transformers(tmp_path / "mine"), whole_model()))
    assert torch.equal(text, whole)


def test_a_lost_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    whole_model().save_pretrained(tmp_path, max_shard_size="40KB")
    lost = "language_model.model.layers.1.self_attn.k_norm.weight"
    index = "model.safetensors.index.json"
    name = json.loads((tmp_path / index).read_text())["weight_map"][lost]
    tensors = load_file(tmp_path / name)
    del tensors[lost]
    save_file(tensors, tmp_path / name, {"format": "pt"})
    with pytest.raises(ConversionError) as error:
        open_source(tmp_path)
    message = str(error.value)
    assert "model.layers.1.self_attn.k_norm.weight [14] is missing" in message
    assert message.endswith(f", though {index} has it in {name}") and message.count("missing") == 1


def released(sizes: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """config.json as it is in the folders. sizes: layers, hidden size, width."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size")
    text = {
        **dict(zip(names, sizes, strict=True)),
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        **more,
    }
    pictures = {"mm_tokens_per_image": 256, "vision_config": {"hidden_size": 1152}, "image_token_index": 262144}
    pictures |= {"boi_token_index": 255999, "eoi_token_index": 256000, "initializer_range": 0.02}
    kind = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16"}
    return {**kind, **pictures, "eos_token_id": [1, 106], "text_config": text}


RELEASED = {
    "gemma3-4b": released((34, 2560, 10240)),
    "gemma3-12b": released((48, 3840, 15360), num_attention_heads=16, num_key_value_heads=8),
    "gemma3-27b": released(
        (62, 5376, 21504), num_attention_heads=32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_presets_have_the_layers_of_released_models(name: str) -> None:
    config = language_config(RELEASED[name], WHERE)
    of_file = read_config(config, WHERE)
    fields = {field: value for field, value in preset(name).items() if field in ModelConfig.__dataclass_fields__}
    of_preset = ModelConfig(**fields)
    assert layers(of_file) == layers(of_preset) and of_file.vocab_size == of_preset.vocab_size == 262_208
    assert config["eos_token_id"] == [1, 106] and not of_file.untie_embeddings_and_output_weights


STRANGE: list[tuple[dict[str, Any], str]] = [
    ({"text_config": None}, "text_config None is no description of a language model"),
    ({"text_config": {"model_type": "llama"}}, "model_type 'llama' in text_config; megazero reads gemma3_text there"),
    ({"pictures_first": True}, "pictures_first True is no key of a gemma3_text model"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is not true or false"),
    ({"quantization_config": {"bits": 4}}, "quantised weights are not read"),
]


@pytest.mark.parametrize(("more", "words"), STRANGE)
def test_what_is_wrong_with_either_part_names_its_key(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversionError) as error:
        read_config(language_config(RELEASED["gemma3-4b"] | more, WHERE), WHERE)
    assert words in str(error.value)
