"""Models of every family in several safetensors files with an index: bit for bit through both directions, tied and
untied; and what is missing from such files is one error that says where it ought to be.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.convert.formats import TargetOptions
from megazero.convert.hf.config import read_config
from megazero.convert.hf.families import FAMILIES
from megazero.convert.hf.writer import write_hf
from megazero.convert.registry import open_source
from megazero.convert.source import ConversionError
from tests.convert.hf_models import CASES, config_of, saved
from tests.convert.test_hf_round_trip import nothing, same_tensors, to

INDEX = "model.safetensors.index.json"
TIED, UNTIED = True, False


def refusal(folder: Path) -> str:
    with pytest.raises(ConversionError) as error:
        open_source(folder)
    return str(error.value)


class Shards:
    """A folder in shards, whose files are changed for a while."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        self.files = {name: load_file(folder / name) for name in sorted(set(self.places.values()))}
        self.shapes = {key: list(self.files[name][key].shape) for key, name in self.places.items()}

    def tensor(self, key: str) -> torch.Tensor:
        return self.files[self.places[key]][key]

    def refusal_of(self, changes: dict[str, torch.Tensor | None]) -> str:
        """What is said where these tensors are others, or not there; the files are as they were afterwards."""
        names = {self.places[key] for key in changes}
        for name in names:
            tensors = {**self.files[name], **{key: new for key, new in changes.items() if self.places[key] == name}}
            kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
            save_file(kept, self.folder / name, {"format": "pt"})
        message = refusal(self.folder)
        for name in names:
            save_file(self.files[name], self.folder / name, {"format": "pt"})
        return message


@pytest.mark.few(cases=6)
@pytest.mark.parametrize("tied", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit(name: str, tied: bool, tmp_path: Path) -> None:
    """Through megazero's own format, into files that are cut elsewhere. A tied model has one tensor for both ends."""
    case = replace(CASES[name], config={**CASES[name].config, "tie_word_embeddings": tied})
    theirs = saved(case, tmp_path / "theirs", max_shard_size="40KB")
    with open_source(to("megazero", theirs, tmp_path / "megazero")) as source:
        (tmp_path / "mine").mkdir()
        write_hf(source, tmp_path / "mine", TargetOptions(), nothing, shard_bytes=30_000)
        assert source.model.untie_embeddings_and_output_weights is not tied
    mine, expected = Shards(tmp_path / "mine"), Shards(theirs)
    assert min(len(mine.files), len(expected.files)) > 2 and mine.files.keys() != expected.files.keys()
    same_tensors(*({key: shards.tensor(key) for key in shards.places} for shards in (mine, expected)))
    assert any(key in expected.places for key in ("lm_head.weight", "embed_out.weight")) is not tied
    assert json.loads((tmp_path / "mine" / "config.json").read_text()) == json.loads(
        (theirs / "config.json").read_text()
    )


@pytest.mark.few(cases=4)
@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_in_one_of_many_files_is_named(name: str, tmp_path: Path) -> None:
    """A tensor of a file, a matrix the wrong way round, the tensors of two names exchanged, a file."""
    shards = Shards(saved(CASES[name], tmp_path / "model", max_shard_size="40KB"))
    shapes, files = shards.shapes, list(shards.files)
    matrices = [key for key, shape in shapes.items() if ".1." in key and len(shape) == 2]
    first = next(key for key in matrices if shapes[key][0] != shapes[key][1])
    second = next(key for key in matrices if shapes[key] != shapes[first])

    message = shards.refusal_of({first: None})
    begin = f"{shards.folder} does not hold the model of its config.json: {first} {shapes[first]} is missing ("
    assert message.startswith(begin) and message.endswith(f"), though {INDEX} has it in {shards.places[first]}")
    assert message.count("is missing") == 1

    message = shards.refusal_of({first: shards.tensor(first).t().contiguous()})
    assert f"{first} is {shapes[first][::-1]}, not {shapes[first]} (" in message
    assert message.count(", not [") == 1

    message = shards.refusal_of({first: shards.tensor(second).clone(), second: shards.tensor(first).clone()})
    for key, other in ((first, second), (second, first)):
        assert f"{key} is {shapes[other]}, not {shapes[key]} (" in message

    (shards.folder / files[1]).unlink()
    assert refusal(shards.folder) == f"{shards.folder} lacks 1 of its {len(files)} files: {files[1]}"


def test_every_family_has_a_case() -> None:
    assert {case.kind for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_no_family_knows_is_one_error_with_its_name(name: str) -> None:
    config = json.loads(config_of(CASES[name]).to_json_string())
    config |= {"architectures": None, "dtype": "float32"}
    read_config(config, Path("there/config.json"))
    for key, value in (("heads_of_another_kind", 3), ("use_something_new", True)):
        with pytest.raises(ConversionError) as error:
            read_config(config | {key: value}, Path("there/config.json"))
        _, _, problems = str(error.value).partition("is not one that megazero computes: ")
        assert problems == (
            f"{key} {value!r} is no key of a {config['model_type']} model that is known here; if it changes nothing of "
            "what the model computes, take it out of config.json"
        )
