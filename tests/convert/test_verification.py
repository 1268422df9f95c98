"""What --verify sees that a comparison of our own readings with each other cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.convert.convert import convert
from megazero.convert.formats import Wanted
from megazero.convert.registry import format_table, open_source
from megazero.data.progress import silent
from megazero.verification import Verdict, verify
from tests.convert.hf_models import CASES, saved
from tests.convert.sources import made

transformers = pytest.importorskip("transformers")


def verified(folder: Path, activation: str | None = None) -> Verdict:
    """A model of Hugging Face's, converted; with `activation` as if config.json had been misread."""
    source = open_source(saved(CASES["gpt2, relu, untied"], folder / "hf"))
    with source:
        if activation:
            source.run = replace(source.run, model=replace(source.run.model, activation=activation))
        convert(source, format_table()["megazero"], folder / "out", Wanted(), silent)
        return verify(source, folder / "out", "megazero", silent)


def test_a_model_of_hugging_face_is_computed_by_transformers(tmp_path: Path) -> None:
    verdict = verified(tmp_path)
    assert verdict.holds and "transformers" in verdict.lines[-1]


def test_a_config_that_was_misread_is_seen(tmp_path: Path) -> None:
    verdict = verified(tmp_path, "gelu-tanh")
    assert not verdict.holds and "NOT the same: logits" in verdict.lines[-1] and "bit-equal" in verdict.lines[0]


def test_a_source_that_transformers_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **named: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuses)
    verdict = verified(tmp_path)
    assert verdict.holds and "does not open" in verdict.lines[-1]


def test_columns_that_were_not_written_are_said(tmp_path: Path) -> None:
    source = made(moments=True)
    convert(source, format_table()["consolidated"], tmp_path / "out", Wanted(), silent)
    verdict = verify(source, tmp_path / "out", "consolidated", silent)
    assert verdict.holds and verdict.lines[1] == "exp_avg, exp_avg_sq of the source: not in what was written"
