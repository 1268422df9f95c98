"""config.json and generation_config.json: reading a run from them, and writing them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from megazero.config.derive import attention_bias, attention_scale, mlp_bias
from megazero.config.dtypes import PRECISION_OF
from megazero.config.model_shape import SHAPE
from megazero.config.options import run_options
from megazero.config.schema import DataConfig, ModelConfig, Run
from megazero.config.validate import out_of_range
from megazero.convert.hf.families import family_called, known_families
from megazero.convert.hf.known_keys import strange_keys
from megazero.convert.hf.language_part import PICTURES_AND_TEXT, language_config
from megazero.convert.hf.shared import SHARE, head_width
from megazero.convert.hf.tables import Config, Family
from megazero.convert.layout import layout_problems
from megazero.convert.source import ConversionError
from megazero.system.reading import BOUNDS, raised_as, read_object, shown

CONFIG, GENERATION = "config.json", "generation_config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before
NAMED_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
"""Keys under which both files name tokens."""


def read_json(path: Path, most: int = BOUNDS.description) -> dict[str, Any]:
    """The object in a JSON file. Raises ConversionError that names the file."""
    with raised_as(ConversionError):
        return read_object(path, most)


def write_json(path: Path, value: Config) -> None:
    """Write JSON as transformers does: indented by two blanks, keys in the given order."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def family_of(config: Config, where: Path) -> Family:
    """The family of a config.json. Raises ConversionError for one that megazero does not know."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known_families():
        known = ", ".join((*known_families(), *PICTURES_AND_TEXT))
        raise ConversionError(f"{where}: model_type {kind!r}; megazero reads {known}")
    try:
        return family_called(kind)
    except ValueError as reason:
        raise ConversionError(f"{where}: model_type {reason}") from reason


def read_config(config: Config, where: Path) -> ModelConfig:
    """The model that a config.json describes.

    Raises ConversionError with everything in it that megazero does not compute.
    """
    family = family_of(config, where)
    problems = [problem for demand in family.demands for problem in demand.problems(config)]
    problems += [*family.further(config), *strange_keys(family, config)]
    found: dict[str, Any] = dict(family.fixed)
    for setting in family.settings:
        try:
            found |= setting.fields(setting.read(config))
        except ValueError as error:
            problems.append(f"{setting.keys[0]}: {error}")
    if not problems:
        model = ModelConfig(**found)
        problems = list(_out_of_range(model)) or layout_problems(model, tp=1, pp=1)
        if not problems:
            return _tidied(model)
    raise ConversionError(
        f"{where}: this {family.model_type} model is not one that megazero computes: " + "; ".join(problems)
    )


def _tidied(model: ModelConfig) -> ModelConfig:
    """The model without settings that say what would be derived anyway."""
    if head_width(model) == SHARE:
        model = replace(model, kv_channels=None)
    without_scale = replace(model, attention_scale=None)
    if math.isclose(attention_scale(model), attention_scale(without_scale), rel_tol=1e-15):
        model = without_scale
    if attention_bias(model) == mlp_bias(model):
        model = replace(model, disable_bias_linear=not mlp_bias(model), attention_bias=None, mlp_bias=None)
    return model


def _out_of_range(model: ModelConfig) -> Iterator[str]:
    for field in fields(model):
        value = getattr(model, field.name)
        if (reason := out_of_range(field.name, value)) is not None:
            yield f"{field.name} {shown(value)} {reason}"


def end_of_text(config: Config, family: Family, vocabulary: int) -> int | None:
    """The id that ends a document, the first if there are several. None where it is not an id of the model."""
    found = config.get("eos_token_id", family.eos)
    if isinstance(found, list):
        found = found[0] if found else None
    return found if type(found) is int and 0 <= found < vocabulary else None


def ids_of(config: Config, key: str) -> list[int]:
    """The ids that config.json has under one of `NAMED_IDS`, as a list: none, one, or several."""
    found = config.get(key)
    return [number for number in (found if isinstance(found, list) else [found]) if type(number) is int]


def ends_of_generation(companions: Mapping[str, Path], vocabulary: int) -> frozenset[int]:
    """All ids at which `transformers` ends a generated text, those outside the vocabulary left out.

    companions: a model's files by name; none name no ids. Raises ConversionError for a file that is no JSON, or whose
    eos_token_id is neither a whole number nor a list of them.
    """
    file, said = generation_file(companions)
    found = said.get("eos_token_id")
    for one in found if isinstance(found, list) else [] if found is None else [found]:
        if type(one) is not int:
            raise ConversionError(
                f"{companions[file]}: eos_token_id is {shown(found)}: a token id, or a list of them, is needed"
            )
    return frozenset(number for number in ids_of(said, "eos_token_id") if 0 <= number < vocabulary)


def generation_file(companions: Mapping[str, Path]) -> tuple[str, dict[str, Any]]:
    """The name and the content of the file that says how `transformers` generates: generation_config.json, without one
    config.json, which old models have such keys in. The content is empty where both are absent.

    Raises ConversionError for a file that is not JSON.
    """
    file = next((name for name in (GENERATION, CONFIG) if name in companions), GENERATION)
    return file, read_json(companions[file]) if file in companions else {}


def original_config(companions: Mapping[str, Path]) -> dict[str, Any] | None:
    """The config.json that a model came with, that of the language model alone; None where there was none.

    companions: its files by name. Raises ConversionError for a file that is no JSON.
    """
    return language_config(read_json(companions[CONFIG]), companions[CONFIG]) if CONFIG in companions else None


def named_dtype(config: Config) -> str | None:
    """A dtype by its name in config.json, which has no "torch."."""
    found = next((config[key] for key in _DTYPE_KEYS if config.get(key) is not None), None)
    return None if found is None else str(found).removeprefix("torch.")


def problems_of(family: Family, model: ModelConfig) -> list[str]:
    """The reasons why a family cannot express a model; empty where it can."""
    problems = [problem for need in family.needs for problem in need.problems(model)]
    return problems or list(_lost(family, model))


def _lost(family: Family, model: ModelConfig) -> Iterator[str]:
    """What a config.json of the family would not say of a model: what it reads back as is compared, field by field."""
    written = new_config(family, Run(model=model), torch.float32)
    try:
        again = read_config(written, Path(CONFIG))
    except ConversionError as reason:
        yield str(reason)
        return
    for name, value in SHAPE.items():
        if value(again) != value(model):
            yield f"{run_options()[name].flag} is {value(model)}, and a {family.model_type} model has {value(again)}"


def family_for(model: ModelConfig, wanted: str | None = None) -> Family:
    """A family that can express a model, `wanted` if it can. Raises ConversionError with every family's reasons."""
    order = [family_called(kind) for kind in sorted(known_families(), key=lambda kind: kind != wanted)]
    reasons = {family.model_type: problems_of(family, model) for family in order}
    for family in order:
        if not reasons[family.model_type]:
            return family
    listed = "; ".join(f"{kind}: {', '.join(problems)}" for kind, problems in reasons.items())
    raise ConversionError(f"no model of Hugging Face's that is known here computes what this one does. {listed}")


def new_config(family: Family, run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """A config.json for a model that had none."""
    made: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for setting in family.settings:
        made |= setting.entries(run.model)
    made |= family.written(run.model) | {
        "bos_token_id": None,
        "eos_token_id": run.data.eod_id,
        "pad_token_id": None,
        "use_cache": True,
    }
    return made | {"torch_dtype": _word(dtype)}


def kept_config(original: Config, where: Path, family: Family, run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that the model came with, with the values replaced that no longer hold."""
    then, made = read_config(original, where), dict(original)
    for setting in family.settings:
        old, new = setting.value(then), setting.value(run.model)
        if old == new or (setting.nominal and old > new):
            continue
        for key in setting.keys:
            made.pop(key, None)
        made |= setting.entries(run.model)
    assert run.model.vocab_size is not None
    if run.data.eod_id is not None and end_of_text(original, family, run.model.vocab_size) != run.data.eod_id:
        made["eos_token_id"] = run.data.eod_id
    if named_dtype(made) is None and dtype != torch.float32:  # what a file that names none means
        made["torch_dtype"] = _word(dtype)
    return made | {key: _word(dtype) for key in _DTYPE_KEYS if key in made}


def generation_config(config: Config, end_of_turn: int | None) -> dict[str, Any]:
    """A generation_config.json for a model without one. end_of_turn: the token that ends an answer, where the model
    answers chats.
    """
    named, ends = {key: config[key] for key in NAMED_IDS if config.get(key) is not None}, ids_of(config, "eos_token_id")
    if end_of_turn is None or end_of_turn in ends:
        return {"_from_model_config": True} | named
    return named | {"eos_token_id": [*ends, end_of_turn]}  # which config.json does not say


def run_of(config: Config, where: Path, dtype: torch.dtype) -> Run:
    """The run that a config.json describes: the model, the precision of its weights, the end of text."""
    model, family = read_config(config, where), family_of(config, where)
    assert model.vocab_size is not None
    empty = Run(model=model, data=DataConfig(eod_id=end_of_text(config, family, model.vocab_size)))
    return replace(empty, optimizer=replace(empty.optimizer, precision=PRECISION_OF[dtype]))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
