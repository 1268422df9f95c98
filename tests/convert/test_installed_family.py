"""A family of an installed package, by an entry point and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.convert.hf.config import family_for, read_config
from megazero.convert.hf.families import FAMILIES, known_families
from megazero.convert.source import ConversionError
from tests.docs.test_families import LLAMA

WHERE = Path("there/config.json")
CODE = """
from dataclasses import replace
from megazero.convert.hf.llama import MISTRAL

def spruce(model_type):
    return replace(MISTRAL, model_type=model_type, architecture="SpruceForCausalLM")

def other(model_type):
    return MISTRAL
"""


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, **names: str) -> None:
    """A package with these families, on the path alone."""
    (folder / "forest.py").write_text(CODE)
    about = folder / "forest-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: forest\nVersion: 1.0\n")
    lines = [f"{name} = forest:{function}" for name, function in names.items()]
    (about / "entry_points.txt").write_text("\n".join(["[megazero.families]", *lines, ""]))
    monkeypatch.syspath_prepend(str(folder))


def test_it_opens_and_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, spruce="spruce")
    assert known_families() == (*FAMILIES, "spruce")
    model = read_config(LLAMA | {"model_type": "spruce", "sliding_window": 7}, WHERE)
    assert model == read_config(LLAMA | {"model_type": "mistral", "sliding_window": 7}, WHERE)
    assert family_for(model, "spruce").architecture == "SpruceForCausalLM"
    assert family_for(replace(model, layer_pattern=None)).model_type == "llama", "those of megazero come first"


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("pine", "other", "is no Family of that model_type"),
        ("pine", "missing", "megazero.families"),
        ("llama", "spruce", "its own llama"),
    ],
)
def test_what_is_no_family(
    name: str, function: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, tmp_path, **{name: function})
    with pytest.raises(ConversionError, match=words):
        read_config(LLAMA | {"model_type": name}, WHERE)
