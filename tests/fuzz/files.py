"""The table of checkpoint files that the fuzzer damages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import folders


def _itself(path: Path) -> Callable[[bytes], bytes]:
    return bytes


@dataclass(frozen=True)
class File:
    """format: the checkpoint's format. pattern: the file in it. part: extracts what is changed; whole: makes a file of
    that again.
    """

    format: str
    pattern: str
    part: Callable[[Path], bytes] = Path.read_bytes
    whole: Callable[[Path], Callable[[bytes], bytes]] = _itself
    is_json: bool = False


def _json(format: str, pattern: str) -> File:
    return File(format, pattern, is_json=True)


def _pickle(format: str, pattern: str) -> File:
    return File(format, pattern, folders.pickle_of, folders.with_pickle)


def _arguments(format: str, pattern: str) -> File:
    return File(format, pattern, folders.arguments_of, folders.with_arguments, is_json=True)


def _header(format: str, pattern: str) -> File:
    return File(format, pattern, folders.header_of, folders.with_header, is_json=True)


FILES: Mapping[str, File] = {
    "manifest": File("megazero", "manifest.json", folders.unsealed, lambda path: folders.manifest, is_json=True),
    "manifest_bytes": File("megazero", "manifest.json"),
    "latest": File("megazero", "latest"),
    "fragments": File("megazero", "fragments-*.safetensors"),
    "hf_config": _json("hf", "config.json"),
    "hf_header": _header("hf", "model.safetensors"),
    "hf_file": File("hf", "model.safetensors"),
    "hf_generation": _json("hf", "generation_config.json"),
    "hf_index": _json("hf-shards", "model.safetensors.index.json"),
    "hf_torch_index": _json("hf-torch", "pytorch_model.bin.index.json"),
    "peft_config": _json("peft", "adapter_config.json"),
    "peft_header": _header("peft", "adapter_model.safetensors"),
    "megatron_arguments": _arguments("megatron", "model_optim_rng.pt"),
    "megatron_pickle": _pickle("megatron", "model_optim_rng.pt"),
    "megatron_tracker": File("megatron", "latest_checkpointed_iteration.txt"),
    "torch_dist_metadata": File("torch_dist", ".metadata"),
    "torch_dist_description": _json("torch_dist", "metadata.json"),
    "torch_dist_arguments": _arguments("torch_dist", "common.pt"),
    "torch_dist_common": _pickle("torch_dist", "common.pt"),
    "torch_dist_pieces": File("torch_dist", "*.distcp"),
    "torch_dist_tracker": File("torch_dist", "latest_checkpointed_iteration.txt"),
    "deepspeed_arguments": _arguments("megatron-deepspeed", "mp_rank_00_model_states.pt"),
    "deepspeed_layer": _pickle("megatron-deepspeed", "layer_01-model_00-model_states.pt"),
    "deepspeed_zero": _pickle("megatron-deepspeed", "*optim_states.pt"),
    "deepspeed_zip": File("megatron-deepspeed", "layer_01-model_00-model_states.pt"),
    "deepspeed_latest": File("megatron-deepspeed", "latest"),
    "universal_arguments": _arguments("universal", "mp_rank_00_model_states.pt"),
    "universal_parameter": _pickle("universal", "fp32.pt"),
    "universal_optimizer": _pickle("universal", "optimizer_state.pt"),
    "universal_latest": File("universal", "latest_universal"),
    "consolidated_arguments": _json("consolidated", "megatron_args.json"),
    "consolidated_weights": _pickle("consolidated", "pytorch_model.bin"),
    "consolidated_header": _header("consolidated-safetensors", "model.safetensors"),
}
