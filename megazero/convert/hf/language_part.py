"""Models of pictures and text, whose language model alone is read: its part of config.json, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megazero.convert.source import ConversionError
from megazero.system.reading import shown

Value = TypeVar("Value")
_OF_BOTH = "tie_word_embeddings"


@dataclass(frozen=True)
class PicturesAndText:
    """A model_type whose language model is one of a family.

    part          key of config.json under which the language model is described
    family        model_type of the language model
    architecture  the class of the language model
    of_pictures   keys of config.json that say nothing about the language model
    begins        beginnings of its tensors' keys in files -> in files of the family; versions of transformers differ
    """

    part: str
    family: str
    architecture: str
    of_pictures: frozenset[str]
    begins: Mapping[str, str]


PICTURES_AND_TEXT: Mapping[str, PicturesAndText] = {
    "gemma3": PicturesAndText(
        "text_config",
        "gemma3_text",
        "Gemma3ForCausalLM",
        frozenset("vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index".split()),
        {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."},
    )
}


def language_config(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The config.json of the language model alone; of another model the same config.json.

    What the whole model says too, such as the tokens that end a text, holds where the part is silent. Raises
    ConversionError for a file without the part, and for one whose part is of another model_type.
    """
    kind = _kind(config)
    if kind is None:
        return dict(config)
    part = config.get(kind.part)
    if not isinstance(part, dict):
        raise ConversionError(f"{where}: {kind.part} {shown(part)} is no description of a language model")
    if part.get("model_type", kind.family) != kind.family:
        raise ConversionError(
            f"{where}: model_type {shown(part['model_type'])} in {kind.part}; megazero reads {kind.family} there"
        )
    whole = {key: value for key, value in config.items() if key not in {*kind.of_pictures, kind.part}}
    of_head = {_OF_BOTH: config[_OF_BOTH]} if config.get(_OF_BOTH) is not None else {}  # the head is the whole model's
    return {**whole, **part, **of_head, "architectures": [kind.architecture], "model_type": kind.family}


def language_tensors(config: Mapping[str, Any], stored: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """(the language model's tensors by the keys that files of its family have, the keys of all others)."""
    kind = _kind(config)
    if kind is None:
        return dict(stored), []
    kept, others = dict[str, Value](), []
    for key, value in stored.items():
        begin = next((begin for begin in kind.begins if key.startswith(begin)), None)
        if begin is None:
            others.append(key)
        else:
            kept[kind.begins[begin] + key.removeprefix(begin)] = value
    return kept, others


def note_of_others(config: Mapping[str, Any], others: list[str]) -> list[str]:
    """A line that says which tensors are left out; none where the model is a language model alone."""
    if _kind(config) is None:
        return []
    parts = dict.fromkeys(key.removeprefix("model.").partition(".")[0] for key in others)
    left_out = f"; {len(others)} tensors of {', '.join(parts)} are left out" if others else ""
    return [f"a {config['model_type']} model of pictures and text, whose language model alone is read{left_out}"]


def _kind(config: Mapping[str, Any]) -> PicturesAndText | None:
    kind = config.get("model_type")
    return PICTURES_AND_TEXT.get(kind) if isinstance(kind, str) else None
