"""The table of families on the page of formats: config.json of each row is read, or refused, as the row says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megazero.convert.hf.config import read_config
from megazero.convert.hf.families import FAMILIES
from megazero.convert.hf.language_part import PICTURES_AND_TEXT, language_config
from megazero.convert.source import ConversionError
from tests.docs.pages import text_of

PAGE = "docs/reference/checkpoint-formats.md"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
}
"""A small one, with what every config.json has."""
SIZES_OF_OTHERS = {
    **dict.fromkeys(("gpt2", "bloom", "opt"), ("intermediate_size", "num_key_value_heads")),
    "gpt_neox": ("num_key_value_heads",),
}
"""model_type -> keys of the small one that such a config.json has not."""


def rows() -> list[tuple[str, str]]:
    """(fields of a config.json, whether it opens) of each row."""
    section = text_of(PAGE).split("## Which models of Hugging Face open\n")[1]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ") and "`" in line]
    return [(fields, opens) for _, said, opens in cells for fields in re.findall(r"`([^`]+)`", said)]


def test_there_are_rows_of_both_kinds() -> None:
    assert {opens for _, opens in rows()} == {"yes", "no"} and len(rows()) >= 8


@pytest.mark.parametrize(("fields", "opens"), rows())
def test_it_opens_or_is_refused_as_the_page_says(fields: str, opens: str) -> None:
    config, where = LLAMA | json.loads(fields), Path("config.json")
    for key in SIZES_OF_OTHERS.get(config["model_type"], ()):
        del config[key]
    if opens == "no":
        with pytest.raises(ConversionError):
            read_config(language_config(config, where), where)
        return
    model = read_config(language_config(config, where), where)
    assert model.num_layers == 2 and model.vocab_size == 320
    theta = config.get("rope_theta")
    assert theta is None or model.rotary_base == theta


def test_every_family_has_a_row() -> None:
    named = {json.loads(fields).get("model_type", "llama") for fields, opens in rows() if opens == "yes"}
    assert named == {*FAMILIES, *PICTURES_AND_TEXT}
