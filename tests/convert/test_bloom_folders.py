"""BLOOM's own layout as it may be found: files without this or that, of other versions, damaged, or with something else
inside.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.convert.megatron_deepspeed.reader import open_megatron_deepspeed
from megazero.convert.registry import open_source, recognise
from megazero.convert.source import MOMENTS, WEIGHT, ConversionError
from tests.convert.bloom_files import Globals, Layout, foreign, save_bloom
from tests.convert.sources import BLOOM, made

MODEL = replace(BLOOM, num_layers=3, hidden_size=16, num_attention_heads=4)
EVERYTHING = (WEIGHT, *MOMENTS)


@pytest.fixture(scope="module")
def values() -> Globals:
    source = made(MODEL, moments=True)
    return {column: {name: source.read(name, column) for name in source.entries} for column in EVERYTHING}


def same(folder: Path, values: Globals, columns: tuple[str, ...] = EVERYTHING, heads: int = 4) -> list[str]:
    """Every tensor is what it was; gives the notes."""
    assert recognise(folder) == "megatron-deepspeed"
    with open_megatron_deepspeed(folder) as source:
        assert source.columns == columns
        for column in columns:
            for name in source.entries:
                wanted = values[column][name]
                assert torch.equal(source.read(name, column), wanted if len(columns) > 1 else wanted.bfloat16()), (
                    name,
                    column,
                )
        assert source.model.num_attention_heads == heads and source.model.num_layers == len(values[WEIGHT]) // 12
        return source.report.apart + source.report.notes


def test_without_slice_mappings(tmp_path: Path, values: Globals) -> None:
    """Parameters then follow each other as param_shapes has them."""
    save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 3), mappings=False)
    same(tmp_path, values)


@pytest.mark.parametrize("columns", [EVERYTHING, (WEIGHT,)], ids=["optimizer", "weights"])
def test_files_without_a_model_axis_and_without_zeros_in_front(
    tmp_path: Path, values: Globals, columns: tuple[str, ...]
) -> None:
    inside = save_bloom({column: values[column] for column in columns}, MODEL, tmp_path, Layout(1, (3,)))
    for file in inside.glob("layer_*"):
        number = int(file.name.removeprefix("layer_").partition("-")[0])
        file.rename(inside / f"layer_{number}-model_states.pt")
    same(tmp_path, values, columns)


@pytest.mark.slow
def test_ranks_and_layers_are_counted_as_numbers(tmp_path: Path) -> None:
    """Layer 10 comes after 9, stage 10 after 2, partition 10 after 2."""
    model = replace(MODEL, num_layers=11)
    source = made(model, moments=True)
    many = {column: {name: source.read(name, column) for name in source.entries} for column in EVERYTHING}
    inside = save_bloom(many, model, tmp_path, Layout(1, (1,) * 11, 11))
    for file in list(inside.iterdir()):
        file.rename(inside / file.name.replace("layer_0", "layer_").replace("mp_rank_0", "mp_rank_"))
    same(tmp_path, many)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [EVERYTHING, (WEIGHT,)], ids=["optimizer", "weights"])
def test_tensor_parallel_ranks_are_counted_as_numbers(columns: tuple[str, ...], tmp_path: Path) -> None:
    """Rank 10 comes after 9, also where no optimizer's files contradict."""
    model = replace(MODEL, num_layers=1, hidden_size=22, num_attention_heads=11)
    source = made(model, moments=True)
    many = {column: {name: source.read(name, column) for name in source.entries} for column in columns}
    inside = save_bloom(many, model, tmp_path, Layout(11, (1,), rows=132))
    for file in list(inside.iterdir()):
        file.rename(inside / file.name.replace("-model_0", "-model_").replace("mp_rank_0", "mp_rank_"))
    same(tmp_path, many, columns, heads=11)


def test_arguments_as_a_dictionary(tmp_path: Path, values: Globals) -> None:
    args = {"num_attention_heads": 4, "vocab_size": 97, "layernorm_epsilon": 1e-6}
    save_bloom(values, MODEL, tmp_path, Layout(2, (3,)), args=args)
    same(tmp_path, values)
    with open_megatron_deepspeed(tmp_path) as source:
        assert source.model.norm_epsilon == 1e-6 and source.model.embedding_layernorm
        assert source.model.position_embedding == "alibi"


def test_arguments_that_are_gone(tmp_path: Path, values: Globals) -> None:
    """The number of heads is in no shape: a config.json beside the files tells it, in Hugging Face's words."""
    inside = save_bloom(values, MODEL, tmp_path, Layout(2, (3,)), args=False)
    with pytest.raises(ConversionError, match=r"number of attention heads.*config\.json"):
        open_megatron_deepspeed(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 4, "layer_norm_epsilon": 1e-6, "vocab_size": 97}))
    notes = same(tmp_path, values)
    assumed = ("seq_length is said nowhere: 2048", "position_embedding_type is said nowhere: alibi")
    assert {f"{words} is assumed" for words in assumed} <= {*notes}
    with open_megatron_deepspeed(tmp_path) as source:
        assert source.model.norm_epsilon == 1e-6
        assert (source.position.iteration, source.position.optimizer_steps) == (4, 4.0)
    with open_megatron_deepspeed(inside) as source:
        assert source.model.norm_epsilon == 1e-6, "the same where the step's own folder is named"
    for file in inside.glob("mp_rank*"):
        file.unlink()
    assert any("no mp_rank files" in note for note in same(tmp_path, values))


def test_the_folder_above_without_latest(tmp_path: Path, values: Globals) -> None:
    save_bloom({WEIGHT: values[WEIGHT]}, MODEL, tmp_path, Layout(1, (3,)))
    (tmp_path / "latest").unlink()
    (tmp_path / "global_step3").mkdir()
    same(tmp_path, values, (WEIGHT,))
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(ConversionError, match="global_step5"):
        open_megatron_deepspeed(tmp_path)


def test_all_rows_are_kept_where_nobody_knows_the_vocabulary(tmp_path: Path, values: Globals) -> None:
    save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 2), vocab_size=None)
    with open_megatron_deepspeed(tmp_path) as source:
        assert source.model.vocab_size == 128
        table = source.read("embedding.word.weight", "exp_avg")
        assert torch.equal(table[:97], values["exp_avg"]["embedding.word.weight"]) and (table[97:] == 3.0).all()
        assert any("all 128 rows" in note for note in source.report.notes)


def test_copies_of_the_tied_embedding_that_differ(tmp_path: Path, values: Globals) -> None:
    """Of the table, which both stages train, the mean is taken; its norm is idle on the last stage."""
    save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 2), behind=0.5)
    with open_megatron_deepspeed(tmp_path) as source:
        for number, column in enumerate(("weight", "exp_avg")):
            found = source.read("embedding.word.weight", column)
            assert torch.allclose(found, values[column]["embedding.word.weight"] + 0.25, atol=1e-6)
            assert len(source.report.replicas) == number + 1 and not source.report.apart
        assert torch.equal(source.read("embedding.norm.weight", "exp_avg"), values["exp_avg"]["embedding.norm.weight"])
        differing = source.report.replicas[1]
        assert differing.key == "layer 1 word_embeddings.weight exp_avg (first and last stage)"
        assert differing.copies == 2 and len(source.report.replicas) == 2
        assert "optimizer tied_modules.embed.word_embeddings.norm.weight (stage 1)" in source.report.unused


def test_masters_that_are_not_the_layer_files(tmp_path: Path, values: Globals) -> None:
    inside = save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 2))
    file = inside / "layer_04-model_01-model_states.pt"
    content = torch.load(file, weights_only=True)
    content["mlp.dense_h_to_4h.weight"][3, :5] += 1.0
    torch.save(content, file)
    notes = same(tmp_path, values)
    assert [note for note in notes if "rounded" in note] == [
        "blocks.1.mlp.up.weight: 5 of 1024 master weights, rounded, are not what the layer files hold; the masters are "
        "taken"
    ]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("layer_03-model_00-model_states", "layer_03-model_01-model_states"),
        ("rank_0_mp_rank_00_optim", "rank_0_mp_rank_01_optim"),
    ],
)
def test_files_of_other_ranks(tmp_path: Path, values: Globals, here: str, there: str) -> None:
    """Swapped, they fit; what they hold does not."""
    inside = save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 2))
    swap(next(inside.glob(f"*{here}*")), next(inside.glob(f"*{there}*")))
    with open_megatron_deepspeed(tmp_path) as source, pytest.raises(ConversionError) as error:
        for name in source.entries:
            source.read(name)
    assert "are not one tensor" in str(error.value) and "*_optim_states.pt" in str(error.value)


def test_tp_ranks_that_store_other_dtypes(tmp_path: Path, values: Globals) -> None:
    """Of one of them half of a tensor would be rounded."""
    inside = save_bloom({WEIGHT: values[WEIGHT]}, MODEL, tmp_path, Layout(2, (1, 2), 2))
    file = inside / "layer_04-model_01-model_states.pt"
    content = torch.load(file, weights_only=True)
    torch.save(
        {key: tensor.float() if key == "self_attention.dense.weight" else tensor for key, tensor in content.items()},
        file,
    )
    with pytest.raises(
        ConversionError, match=r"layer 4 self_attention\.dense\.weight is stored as torch.bfloat16 and torch.float32 by"
    ):
        open_megatron_deepspeed(tmp_path)


def test_files_of_other_partitions(tmp_path: Path, values: Globals) -> None:
    inside = save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 2))
    swap(*(inside / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)))
    said = r"do not follow each other: .* should end the one and go on in the other"
    with pytest.raises(ConversionError, match=said):
        open_megatron_deepspeed(tmp_path)


def swap(here: Path, there: Path) -> None:
    first, second = here.read_bytes(), there.read_bytes()
    here.write_bytes(second)
    there.write_bytes(first)


def without(name: str) -> Any:
    def spoil(inside: Path) -> None:
        (inside / name).unlink()

    return spoil


def changed(name: str, key: str, change: Any) -> Any:
    def spoil(inside: Path) -> None:
        content = torch.load(inside / name, weights_only=True)
        if change is None:
            del content[key]
        else:
            content[key] = change(content.get(key))
        torch.save(content, inside / name)

    return spoil


LAYER = "layer_04-model_01-model_states.pt"
SPOILT = {
    "a tp rank's layer file": (without(LAYER), "of layer 4 the files of tp ranks 1 of 2 are missing"),
    "a layer": (lambda inside: [file.unlink() for file in inside.glob("layer_04*")], "layers 4 are missing"),
    "the final norm": (lambda inside: [file.unlink() for file in inside.glob("layer_07*")], "no final norm"),
    "all files of a tp rank": (
        lambda inside: [file.unlink() for file in inside.glob("layer_*model_01*")],
        "tensor_model_parallel_size is 2",
    ),
    "a stage's mp_rank file": (without("mp_rank_03_model_states.pt"), "mp_rank files of 3 ranks"),
    "an mp_rank file in between": (without("mp_rank_02_model_states.pt"), "mp_rank files of ranks 2 are missing"),
    "an optimizer partition": (
        without("bf16_zero_pp_rank_1_mp_rank_02_optim_states.pt"),
        "cut into 2 dp partitions.*rank 2 there are 1 files",
    ),
    "the last partitions": (
        lambda inside: [file.unlink() for file in inside.glob("*zero_pp_rank_1*")],
        "cut into 2 dp partitions.*4 of 4 ranks",
    ),
    "a stage's optimizer files": (
        lambda inside: [file.unlink() for file in inside.glob("*mp_rank_0[23]_opt*")],
        "optimizer files of 2 ranks",
    ),
    "a key": (changed(LAYER, "mlp.dense_h_to_4h.bias", None), "do not hold the same keys"),
    "another key": (changed(LAYER, "mlp.extra.bias", lambda old: torch.ones(2)), "do not hold the same keys"),
    "a shape": (
        changed(LAYER, "self_attention.dense.weight", lambda old: old[:, :3].clone()),
        "layer 4 self_attention.dense.weight has different shapes",
    ),
    "a damaged file": (
        lambda inside: (inside / LAYER).write_bytes((inside / LAYER).read_bytes()[:900]),
        "no whole file",
    ),
}


@pytest.mark.parametrize("name", list(SPOILT))
def test_folders_that_are_not_whole(tmp_path: Path, values: Globals, name: str) -> None:
    spoil, named = SPOILT[name]
    inside = save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 2))
    spoil(inside)
    with pytest.raises(ConversionError, match=named):
        open_megatron_deepspeed(tmp_path)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"num_layers": 4}, "num_layers is 4 by the arguments and 3 by the tensors"),
        ({"hidden_size": 32}, "hidden_size is 32 by the arguments and 16"),
        ({"num_experts": [8]}, "num_experts"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"num_attention_heads": 5}, r"blocks.0.attention.qkv.weight is \[60, 16\]"),
        ({"position_embedding_type": "learned_absolute"}, "layer 1 position_embeddings.weight is missing"),
    ],
)
def test_arguments_that_contradict(tmp_path: Path, values: Globals, said: dict[str, Any], named: str) -> None:
    save_bloom({WEIGHT: values[WEIGHT]}, MODEL, tmp_path, Layout(1, (3,)), **said)
    with pytest.raises(ConversionError, match=named):
        open_megatron_deepspeed(tmp_path)


@pytest.mark.parametrize("by", ["name", "value"])
def test_members_of_enumerations(tmp_path: Path, values: Globals, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3 pickles their names, all others their values."""

    def named(member: enum.Enum, protocol: int) -> Any:
        return (getattr, (type(member), member.name)) if by == "name" else (type(member), (member.value,))

    monkeypatch.setattr(enum.Enum, "__reduce_ex__", named)
    inside = save_bloom(values, MODEL, tmp_path, Layout(1, (3,), 2), dtype=torch.float16, bf16=False, fp16=True)
    monkeypatch.undo()
    assert (b"getattr" in (inside / "mp_rank_00_model_states.pt").read_bytes()) == (by == "name")
    assert (b"getattr" in next(inside.glob("*optim_states.pt")).read_bytes()) == (by == "name")
    with open_megatron_deepspeed(tmp_path) as source:
        assert source.model.position_embedding == "alibi" and source.columns == EVERYTHING
        for name, value in values[WEIGHT].items():
            assert torch.equal(source.read(name), value), name


def test_another_version_is_refused(tmp_path: Path, values: Globals) -> None:
    """Its rows of query, key and value are in another order, which no shape shows."""
    inside = save_bloom(
        {WEIGHT: values[WEIGHT]}, MODEL, tmp_path, Layout(1, (3,)), args={"num_attention_heads": 4, "vocab_size": 97}
    )
    file = inside / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=True)
    torch.save(state | {"checkpoint_version": 2.0}, file)
    with pytest.raises(ConversionError, match=r"checkpoint_version 2\.0: only 3\.0"):
        open_megatron_deepspeed(tmp_path)
    del state["checkpoint_version"]
    torch.save(state, file)
    same(tmp_path, values, (WEIGHT,))


class Call:
    """Pickled, a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize(
    "file",
    [
        "layer_05-model_01-model_states.pt",
        "mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_03_optim_states.pt",
    ],
)
def test_a_pickle_that_names_os_system_is_refused(tmp_path: Path, values: Globals, file: str) -> None:
    inside = save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 2))
    mark = tmp_path / "it ran"
    attack = Call(f"{sys.executable} -c \"open({str(mark)!r}, 'w')\"")
    torch.save({"optimizer_state_dict": attack, "args": attack, "weight": torch.ones(2), "more": attack}, inside / file)
    with pytest.raises(ConversionError, match=f"{file} names 'posix.system'.*nothing of it was run"):
        open_megatron_deepspeed(tmp_path)
    assert not mark.exists()


OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_03_optim_states.pt"
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "a version of tensors": ("mp_rank_00_model_states.pt", {"checkpoint_version": torch.ones(2)}),
    "an iteration that is a list": ("mp_rank_00_model_states.pt", {"iteration": [4]}),
    "slices that are text": (OPTIMIZER, {"param_slice_mappings": "abc"}),
    "slices of a group that is not there": (OPTIMIZER, {"param_slice_mappings": [{}, {}, {"x": (1, 0)}]}),
    "masters that are numbers": (OPTIMIZER, {"single_partition_of_fp32_groups": [1, 2]}),
    "masters that are not flat": (OPTIMIZER, {"single_partition_of_fp32_groups": [torch.ones(2, 2)] * 2}),
}


@pytest.mark.parametrize("name", list(FOREIGN))
def test_what_a_format_does_not_have_there_is_one_error(tmp_path: Path, values: Globals, name: str) -> None:
    file, other = FOREIGN[name]
    inside = save_bloom(values, MODEL, tmp_path, Layout(2, (1, 2), 2))
    with foreign():
        state = torch.load(inside / file, weights_only=False)
        (state["optimizer_state_dict"] if file == OPTIMIZER else state).update(other)
        torch.save(state, inside / file)
    with pytest.raises(ConversionError, match=r"not what that format has there|not kept as flat"):
        open_source(tmp_path)
