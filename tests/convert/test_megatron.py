"""Megatron-LM's torch format: files built from its description are read, and what is written is read back."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from megazero.config.inventory import tp_axis
from megazero.config.schema import ModelConfig
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.megatron.registered import FORMAT, open_megatron
from megazero.convert.registry import format_table, recognise
from megazero.convert.source import ConversionError, parameter_specs
from megazero.data.progress import silent
from tests.convert.megatron_files import padded, save_megatron
from tests.convert.sources import AS_LLAMA, made

GPT = ModelConfig(
    num_layers=4,
    hidden_size=24,
    ffn_hidden_size=96,
    num_attention_heads=4,
    vocab_size=97,
    make_vocab_size_divisible_by=8,
    seq_length=16,
    max_position_embeddings=16,
    position_embedding="learned",
)
LLAMA = replace(GPT, ffn_hidden_size=20, **AS_LLAMA)
MODELS = {
    "gpt": GPT,
    "untied": replace(GPT, untie_embeddings_and_output_weights=True, kv_channels=8, activation="gelu"),
    "llama": LLAMA,
    "gated-biases": replace(LLAMA, disable_bias_linear=False, untie_embeddings_and_output_weights=False),
}


def same(opened, source, *columns: str, dtype: torch.dtype = torch.float32) -> None:
    assert list(opened.entries) == list(source.entries)
    for name, entry in opened.entries.items():
        for column in columns or ("weight",):
            expected = source.read(name, column).to(dtype)
            found = opened.read(name, column)
            assert (found.dtype, tuple(found.shape)) == (entry.columns[column], entry.shape), (name, column)
            assert torch.equal(found, expected), (name, column)


LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2)]
READ = [
    *((name, *layout, style) for name in ("gpt", "llama") for layout in LAYOUTS for style in ("te", "local", "legacy")),
    *((name, 2, 2, 1, "te") for name in ("untied", "gated-biases")),
]


@pytest.mark.parametrize(("name", "tp", "pp", "virtual", "style"), READ)
def test_files_are_read(tmp_path, name, tp, pp, virtual, style):
    model = MODELS[name]
    source = made(model)
    save_megatron(source, tmp_path, tp=tp, pp=pp, virtual=virtual, style=style)
    assert recognise(tmp_path) == "megatron"
    with open_megatron(tmp_path) as opened:
        same(opened, source)
        assert opened.model == model
        assert (opened.position.iteration, opened.position.consumed_samples) == (7, 84)
        assert opened.run.optimizer.adam_beta2 == 0.97
        assert not opened.report.replicas
        assert ("rng_state" in opened.report.unused) and len(opened.report.mapped) >= len(
            opened.entries
        ) - 2 * model.num_layers
        if style == "te":
            assert sum("_extra_state" in key for key in opened.report.unused) >= 3


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_is_written_is_what_megatron_writes(tmp_path, model, tp, pp):
    """Key for key, against files that the converters had no part in."""
    source = made(model)
    save_megatron(source, tmp_path / "theirs", tp=tp, pp=pp)
    convert(source, FORMAT, tmp_path / "ours", TargetOptions(tp=tp, pp=pp), silent)
    with open_megatron(tmp_path / "ours") as opened:
        same(opened, source)
        assert opened.model == model
    files = sorted(path.relative_to(tmp_path / "theirs") for path in (tmp_path / "theirs").rglob("*.pt"))
    assert files == sorted(path.relative_to(tmp_path / "ours") for path in (tmp_path / "ours").rglob("*.pt"))
    assert (tmp_path / "ours" / "latest_checkpointed_iteration.txt").read_text().strip() == "7"
    for file in files:
        theirs, ours = (torch.load(tmp_path / which / file, weights_only=False) for which in ("theirs", "ours"))
        assert ours["checkpoint_version"] == 3.0
        shared = {key: value for key, value in vars(theirs["args"]).items() if key in vars(ours["args"])}
        assert len(shared) > 25
        differing = {key for key, value in shared.items() if vars(ours["args"])[key] != value}
        assert differing <= {"params_dtype", "bf16", "num_query_groups", "adam_beta2"}
        expected = {key: value for key, value in theirs["model"].items() if "_extra_state" not in key}
        assert set(ours["model"]) == set(expected)
        for key, value in expected.items():
            rows = value.shape[0]
            if "word_embeddings" in key or "output_layer" in key:  # padding is zeros where training has not been
                rank = int(file.parts[1].split("_")[2])
                rows = max(0, min(rows, model.vocab_size - rank * padded(model, tp) // tp))
                assert not ours["model"][key][rows:].any()
            assert torch.equal(ours["model"][key][:rows], value[:rows]), key


@pytest.mark.parametrize("style", ["te", "legacy"])
@pytest.mark.parametrize(("tp", "pp", "virtual"), [(2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("model", [MODELS["gpt"], MODELS["llama"]], ids=["gpt", "llama"])
def test_masters_and_moments_are_found_by_their_order(tmp_path, model, tp, pp, virtual, style):
    source = made(model, moments=True)
    save_megatron(source, tmp_path, tp=tp, pp=pp, virtual=virtual, style=style, dtype=torch.bfloat16, optimizer=True)
    with open_megatron(tmp_path) as opened:
        assert opened.columns == ("weight", "exp_avg", "exp_avg_sq")
        assert opened.run.optimizer.precision == "bf16"
        same(opened, source, "weight", "exp_avg", "exp_avg_sq")
        assert opened.position.optimizer_steps == 5.0
        assert opened.position.loss_scale == {"scale": 4096.0, "good_steps": 3, "overflows": 1}


def test_an_order_that_is_not_certain_is_not_used(tmp_path):
    source = made(GPT, moments=True)
    inside = save_megatron(source, tmp_path, dtype=torch.bfloat16, optimizer=True)
    (file,) = inside.rglob("*.pt")
    state = torch.load(file, weights_only=False)
    masters = state["optimizer"]["fp32_from_fp16_params"][1]
    masters[2], masters[8] = masters[8], masters[2]  # of equal shape
    torch.save(state, file)
    with open_megatron(tmp_path) as opened:
        assert opened.columns == ("weight",)
        assert "not carried over" in opened.report.unused["optimizer"]
        same(opened, source, dtype=torch.bfloat16)


def test_replicas_that_differ_are_averaged_and_named(tmp_path):
    source = made(GPT)
    inside = save_megatron(source, tmp_path, tp=2)
    file = inside / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    key = "decoder.layers.1.self_attention.linear_proj.bias"
    state["model"][key] += 0.5
    torch.save(state, file)
    with open_megatron(tmp_path) as opened:
        expected = source.read("blocks.1.attention.output.bias").double() + 0.25
        torch.testing.assert_close(opened.read("blocks.1.attention.output.bias").double(), expected)
        (differing,) = opened.report.replicas
        assert (differing.key, differing.copies) == (key, 2) and differing.largest == pytest.approx(0.25)


def test_a_bias_of_query_key_and_value_alone(tmp_path):
    """--add-qkv-bias of Megatron: ours has a bias behind attention too, which is zero."""
    model = replace(LLAMA, attention_bias=True)
    source = made(model)
    save_megatron(source, tmp_path, tp=2)
    with open_megatron(tmp_path) as opened:
        assert opened.model == model
        for name in opened.entries:
            found = opened.read(name)
            assert torch.equal(found, torch.zeros(24) if name.endswith("output.bias") else source.read(name)), name
        assert len(opened.report.filled) == 4


def test_the_vocabulary_is_cut_only_where_it_is_known(tmp_path):
    save_megatron(made(GPT), tmp_path, tp=2, vocab_size=None)
    with open_megatron(tmp_path) as opened:
        assert opened.model.vocab_size == padded(GPT, 2) == 112
        assert opened.read("embedding.word.weight")[97:].eq(7.0).all()
        assert any("padding included" in note for note in opened.report.notes)


def test_the_null_tokenizer_has_one_token_more_than_its_argument(tmp_path):
    source = made(GPT)
    save_megatron(source, tmp_path, vocab_size=96, tokenizer_type="NullTokenizer")
    with open_megatron(tmp_path) as opened:
        same(opened, source)


def test_a_release(tmp_path):
    source = made(GPT)
    save_megatron(source, tmp_path).rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    with open_megatron(tmp_path) as opened:
        same(opened, source)
    with open_megatron(tmp_path / "release") as opened:
        same(opened, source)


def test_a_folder_without_a_tracker_has_its_newest(tmp_path):
    source = made(GPT)
    inside = save_megatron(source, tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "iter_0000100").mkdir()  # empty
    assert recognise(tmp_path) == recognise(inside) == "megatron"
    with open_megatron(tmp_path) as opened:
        assert opened.path == inside
        same(opened, source)


def test_the_tracker_of_another_program(tmp_path):
    """Megatron-DeepSpeed writes Megatron's tracker beside its own `latest`."""
    convert(made(GPT), format_table()["megatron-deepspeed"], tmp_path / "out", TargetOptions(), silent)
    (tmp_path / "out" / "latest_checkpointed_iteration.txt").write_text("7")
    assert recognise(tmp_path / "out") == "megatron-deepspeed"


def test_a_distributed_optimizers_file_is_reported(tmp_path):
    inside = save_megatron(made(GPT), tmp_path, dtype=torch.bfloat16)
    torch.save({0: torch.zeros(4)}, inside / "mp_rank_00" / "distrib_optim.pt")
    with open_megatron(tmp_path) as opened:
        assert opened.columns == ("weight",) and "distrib_optim.pt" in opened.report.unused["optimizer"]


REFUSED = {
    "version": ({"version": 2.0}, "checkpoint_version 2.0: only 3.0"),
    "rotary_percent": ({"rotary_percent": 0.5}, "rotary_percent 0.5 is not supported"),
    "experts": ({"num_experts": 8}, "num_experts 8 is not supported"),
    "layernorm_1p": ({"apply_layernorm_1p": True}, "apply_layernorm_1p True is not supported"),
    "norms around zero": (
        {"layernorm_zero_centered_gamma": True},
        "layernorm_zero_centered_gamma True is not supported",
    ),
    "scale of scores": ({"softmax_scale": 2.0}, "softmax_scale 2.0 is not supported"),
    "positions": ({"position_embedding_type": "yarn"}, "position_embedding_type yarn is none of"),
    "ranks": ({"tensor_model_parallel_size": 4}, "tensor_model_parallel_size is 4, there are files for 2"),
    "layers": ({"num_layers": 5}, "blocks.4.attention.qkv.weight is missing"),
    "fewer layers": (
        {"num_layers": 3},
        "decoder.layers.3.self_attention.linear_qkv.weight is a weight that a model with these arguments",
    ),
    "width": ({"ffn_hidden_size": 32}, "mlp.linear_fc1.weight has shape [96, 24] over 2 tensor-parallel ranks"),
}


@pytest.mark.parametrize(("changed", "said"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name_and_number(tmp_path, changed, said):
    save_megatron(made(GPT), tmp_path, tp=2, **changed)
    with pytest.raises(ConversionError, match=re.escape(said)):
        open_megatron(tmp_path)


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    inside = save_megatron(
        made(GPT), tmp_path, tp=2, pp=2, version=1.0, num_experts=4, qk_layernorm=True, tensor_model_parallel_size=8
    )
    with pytest.raises(
        ConversionError, match=r"_version 1\.0.*tensor_model_parallel_size is 8.*num_experts 4.*qk_layernorm True"
    ):
        open_megatron(tmp_path)
    for rank in ("mp_rank_00_001", "mp_rank_01_000"):
        (inside / rank / "model_optim_rng.pt").unlink()
    with pytest.raises(ConversionError, match=r"mp_rank_00_001 holds no .*mp_rank_01_000 holds no .* are missing"):
        open_megatron(tmp_path)


@pytest.mark.parametrize("style", ["te", "legacy"])
def test_files_of_other_stages(tmp_path, style):
    """Swapped, they have every name that is needed; the blocks would stand in another order."""
    inside = save_megatron(made(GPT), tmp_path, pp=2, style=style)
    for here, there in (("mp_rank_00_000", "aside"), ("mp_rank_00_001", "mp_rank_00_000"), ("aside", "mp_rank_00_001")):
        (inside / here).rename(inside / there)
    with pytest.raises(
        ConversionError,
        match=r"word_embeddings\.weight is in model chunk 2 of 2, not in the first.*final_layernorm.weight is in",
    ):
        open_megatron(tmp_path)


def test_another_kind_of_model_is_not_taken_for_a_gpt(tmp_path):
    """BERT's files have the same names for the most part."""
    inside = save_megatron(made(GPT), tmp_path, style="legacy")
    (file,) = inside.rglob("*.pt")
    state = torch.load(file, weights_only=False)
    state["model"]["lm_head"] = {"dense.weight": torch.zeros(24, 24)}
    torch.save(state, file)
    with pytest.raises(ConversionError, match=r"lm_head\.dense\.weight is a weight that"):
        open_megatron(tmp_path)


def test_what_megatron_does_not_have_is_not_written(tmp_path):
    bloom = replace(GPT, position_embedding="alibi", embedding_layernorm=True)
    with pytest.raises(ConversionError, match=r"alibi.*embed-layernorm"):
        convert(made(bloom), FORMAT, tmp_path / "out", TargetOptions(), silent)
    with pytest.raises(ConversionError, match="--pp 3: Megatron-LM divides its layers evenly"):
        convert(made(GPT), FORMAT, tmp_path / "out", TargetOptions(pp=3), silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_table_of_axes_is_what_our_layers_do(model):
    whole, half = parameter_specs(model), parameter_specs(model, 2, 1)
    for name, place in half.items():
        differing = [
            axis for axis, ((a, b), n) in enumerate(zip(place.box, whole[name].shape, strict=True)) if b - a != n
        ]
        assert differing == [axis for axis in [tp_axis(name)] if axis is not None], name
