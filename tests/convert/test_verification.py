"""What --verify sees that a comparison of our own readings with each other cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.native import write_native
from megazero.convert.registry import format_table, open_source
from megazero.convert.verification import Verdict, verify
from megazero.data.progress import silent
from tests.convert.hf_models import CASES, saved
from tests.convert.sources import made


def verified(folder: Path, activation: str | None = None) -> Verdict:
    """A model of Hugging Face's, converted; with `activation` as if config.json had been misread."""
    source = open_source(saved(CASES["gpt2, relu, untied"], folder / "hf"))
    with source:
        if activation:
            source.run = replace(source.run, model=replace(source.run.model, activation=activation))
        convert(source, format_table()["megazero"], folder / "out", TargetOptions(), silent)
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

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuses)
    verdict = verified(tmp_path)
    assert verdict.holds and "does not open" in verdict.lines[-2] and "not compared: what megazero" in verdict.lines[-1]


def test_what_megazero_wrote_itself_has_no_other_program(tmp_path: Path) -> None:
    write_native(made(precision="fp32"), tmp_path / "own", TargetOptions(), lambda count: None)
    with open_source(tmp_path / "own") as source:
        convert(source, format_table()["hf"], tmp_path / "hf", TargetOptions(), silent)
        verdict = verify(source, tmp_path / "hf", "hf", silent)
    assert verdict.holds and not any("not compared" in line for line in verdict.lines), verdict.lines


def altered(to: str, pattern: str, alter: Callable[[Any], None], folder: Path, wanted: TargetOptions) -> Verdict:
    """A checkpoint with the optimizer's state, one of whose files is changed after it was written."""
    source = made(moments=True, precision="bf16")
    convert(source, format_table()[to], folder, wanted, silent)
    assert verify(source, folder, to, silent).holds
    (file, *_) = sorted(folder.rglob(pattern))
    content = torch.load(file, weights_only=True)
    alter(content)
    torch.save(content, file)
    return verify(source, folder, to, silent)


def one_more(tensor: Tensor) -> None:
    tensor.view(-1)[0] += 1


DEEPSPEED = TargetOptions(pp=2, dp=2)
ALTERED: dict[str, tuple[str, str, Callable[[Any], None], TargetOptions, str]] = {
    "16-bit weight beside its master": (
        "megatron-deepspeed",
        "layer_04-*",
        lambda held: one_more(held["mlp.dense_4h_to_h.weight"]),
        DEEPSPEED,
        "blocks.1.mlp.down.weight: 1 of 2304 master weights, rounded, are not what the layer files hold",
    ),
    "a parameter's step": (
        "universal",
        "3.*/step.pt",
        one_more,
        TargetOptions(),
        "step.pt is 8 of 3.input_layernorm.bias (1 such), 7 of the others",
    ),
}


@pytest.mark.parametrize("case", ALTERED.values(), ids=ALTERED)
def test_copies_that_contradict_each_other(
    case: tuple[str, str, Callable[[Any], None], TargetOptions, str], tmp_path: Path
) -> None:
    to, pattern, alter, wanted, words = case
    verdict = altered(to, pattern, alter, tmp_path / "out", wanted)
    assert not verdict.holds and verdict.lines[-1].startswith("NOT the same") and words in verdict.lines[-1]


def test_a_position_that_is_another(tmp_path: Path) -> None:
    source = made(moments=True)
    convert(source, format_table()["universal"], tmp_path / "out", TargetOptions(), silent)
    source.position = replace(source.position, optimizer_steps=6.0)
    verdict = verify(source, tmp_path / "out", "universal", silent)
    assert verdict.lines == ("NOT the same: optimizer_steps was 6.0, is 7.0",)


def test_columns_that_were_not_written_are_said(tmp_path: Path) -> None:
    source = made(moments=True)
    convert(source, format_table()["consolidated"], tmp_path / "out", TargetOptions(), silent)
    verdict = verify(source, tmp_path / "out", "consolidated", silent)
    assert verdict.holds and verdict.lines[1] == "exp_avg, exp_avg_sq of the source: not in what was written"
