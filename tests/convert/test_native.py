"""megazero's own format as a source and a target."""

from __future__ import annotations

import pytest
import torch

import megazero
from megazero.convert.changed import Rounded, Trimmed
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.native import open_native, write_native
from megazero.convert.registry import format_table, open_source, recognise
from megazero.convert.source import ConversionError
from megazero.data.progress import silent
from tests.convert.sources import BLOOM, made


def quietly(count: int) -> None:
    """Nobody watches."""


@pytest.mark.parametrize("moments", [False, True])
def test_everything_comes_back(tmp_path, moments):
    source = made(moments=moments, precision="bf16")
    write_native(source, tmp_path, TargetOptions(), quietly)
    assert recognise(tmp_path) == recognise(tmp_path / "iter_0000007") == "megazero"
    with open_source(tmp_path) as read:
        assert read.columns == source.columns and len(read.columns) == (3 if moments else 1)
        assert (
            read.position == source.position
            and read.run.model == source.run.model
            and read.run.optimizer.precision == "bf16"
        )
        assert list(read.entries) == list(source.entries)
        for name in source.entries:
            for column in source.columns:
                assert torch.equal(read.read(name, column), source.read(name, column)), (name, column)


def test_files_are_closed_when_they_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.convert.native.FILE_BYTES", 4000)
    source = made()
    write_native(source, tmp_path, TargetOptions(), quietly)
    assert len(list((tmp_path / "iter_0000007").glob("*.safetensors"))) > 3
    with open_native(tmp_path) as read:
        assert all(torch.equal(read.read(name), source.read(name)) for name in source.entries)


def test_companions_travel(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_native(made(companions={"config.json": tmp_path / "config.json"}), tmp_path / "a", TargetOptions(), quietly)
    with open_native(tmp_path / "a") as first:
        write_native(first, tmp_path / "b", TargetOptions(), quietly)
    with open_native(tmp_path / "b") as second:
        assert second.companions["config.json"].read_text() == "{}"


@pytest.mark.parametrize("name", ["megatron-deepspeed", "universal"])
def test_companions_travel_through_formats_that_have_no_place_for_them(tmp_path, name):
    (tmp_path / "tokenizer.json").write_text("{}")
    source = made(companions={"tokenizer.json": tmp_path / "tokenizer.json"})
    convert(source, format_table()[name], tmp_path / "out", TargetOptions(), silent)
    with open_source(tmp_path / "out") as read:
        assert read.format == name and read.companions["tokenizer.json"].read_text() == "{}"


def test_narrowed_weights_and_the_precision_they_are_for(tmp_path):
    source = made(moments=True)
    write_native(source, tmp_path, TargetOptions(dtype=torch.bfloat16), quietly)
    with open_native(tmp_path) as read:
        assert read.run.optimizer.precision == "bf16"
        name = "blocks.1.mlp.up.weight"
        assert torch.equal(read.read(name), source.read(name).bfloat16())
        assert torch.equal(read.read(name, "exp_avg"), source.read(name, "exp_avg"))


def test_load_gives_the_model(tmp_path):
    write_native(made(), tmp_path, TargetOptions(), quietly)
    model = megazero.load(tmp_path, precision="fp64")
    logits = model(torch.arange(20).view(2, 10))
    assert logits.shape == (2, 10, 97) and logits.dtype == torch.float64 and not model.training
    assert model.config == BLOOM and model.tokenizer is None
    assert (logits[1:] - model(torch.arange(10, 20).view(1, 10))).abs().max() < 1e-12


def test_a_flipped_bit_is_one_clear_error(tmp_path):
    write_native(made(), tmp_path, TargetOptions(), quietly)
    (file,) = (tmp_path / "iter_0000007").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with open_native(tmp_path) as read, pytest.raises(ConversionError, match="altered"):
        for name in read.entries:
            read.read(name)


def test_trimmed_vocabulary_and_rounded_weights():
    source = made()
    shorter = Trimmed(source, 90)
    assert shorter.model.vocab_size == 90 and shorter.entries["embedding.word.weight"].shape == (90, 24)
    assert torch.equal(shorter.read("embedding.word.weight"), source.read("embedding.word.weight")[:90])
    assert "7 rows" in source.report.notes[0]
    with pytest.raises(ConversionError, match="97 rows"):
        Trimmed(source, 98)


def test_tokens_that_the_model_names_are_not_left_out(tmp_path):
    """transformers does not open a model whose padding token is beyond its table."""
    config = tmp_path / "config.json"
    config.write_text('{"pad_token_id": 96, "eos_token_id": [2, 95], "bos_token_id": 50256}')
    source = made(companions={"config.json": config})
    with pytest.raises(
        ConversionError,
        match=r"--vocab-size 90 leaves out tokens .* eos_token_id in config.json 95, pad_token_id in config.json 96; "
        r"nearest: 97",
    ):
        Trimmed(source, 90)
    assert Trimmed(made(), 90).model.vocab_size == 90
    assert Rounded(source, torch.float16).read("head.norm.bias").dtype == torch.float16
