"""The names of formats and checkpoints. Nothing here imports torch, so that a program's help can name them quickly."""

from __future__ import annotations

from pathlib import Path

from megazero.system.names import may_be_on_the_hub

FORMATS = (
    "megatron",
    "megatron-deepspeed",
    "megazero",
    "peft",
    "hf",
    "universal",
    "consolidated",
    "consolidated-safetensors",
)
"""The names of `registry.format_table`, in its order. All of them are read and written."""
TARGETS = (*FORMATS, "gguf")
"""The names of `registry.target_table`: what is written."""
QUANTIZED = ("q8_0",)
"""Values of --dtype that are blocks of integers. Only gguf has them."""


def missing_path_message(path: Path) -> str:
    """The message for a checkpoint path that does not exist; it may be meant as a model's name on the Hub."""
    name = str(path)
    if "/" in name or not may_be_on_the_hub(name):
        return f"{path}: there is no such checkpoint"
    return (
        f"{path}: there is no such checkpoint here; if it is a model of Hugging Face's Hub, name its owner too: "
        f"ORG/{name}"
    )
