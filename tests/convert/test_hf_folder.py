"""A Hugging Face folder as it can be: damaged, incomplete, contradictory; and the one that a model of megazero's own
becomes.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.config.schema import DataConfig, ModelConfig
from megazero.convert.formats import TargetOptions
from megazero.convert.hf.writer import write_hf
from megazero.convert.registry import open_source, recognise
from megazero.convert.source import ConversionError
from megazero.convert.stages import fill_stages
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.data.train_bpe import train_bpe
from megazero.model.batch import MicroBatch
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, whole_model
from megazero.mpu.grid import single_rank_group
from tests.convert.hf_models import CASES, saved
from tests.convert.sources import made
from tests.convert.test_hf_config import FRESH
from tests.data.chats import write_tokenizer
from tests.parity.float64 import in_float64

Tensors = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def refusal(folder: Path, name: str | None = None) -> str:
    with pytest.raises(ConversionError) as error, open_source(folder) as source:
        source.read(name or next(iter(source.entries)))
    return str(error.value)


def test_everything_missing_or_misshapen_is_listed(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.decoder.layers.1.self_attn.k_proj.weight"], tensors["model.decoder.final_layer_norm.bias"]
        tensors["model.decoder.embed_positions.weight"] = torch.zeros(24, 48)
        tensors["model.decoder.layers.3.fc1.weight"] = torch.zeros(80, 48, dtype=torch.int8)

    words = refusal(changed(saved(CASES["opt"], tmp_path / "x"), damage))
    assert "model.decoder.layers.1.self_attn.k_proj.weight [48, 48] is missing (blocks.1.attention.qkv.weight)" in words
    assert "model.decoder.final_layer_norm.bias [48] is missing (head.norm.bias)" in words
    assert "model.decoder.embed_positions.weight is [24, 48], not [26, 48] (embedding.position.weight)" in words
    assert "model.decoder.layers.3.fc1.weight is stored as I8" in words


def test_surplus_and_several_dtypes_are_told(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.4.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].bfloat16()

    folder = changed(saved(CASES["llama, grouped"], tmp_path / "x", torch.float16), change)
    with open_source(folder) as source:
        assert source.report.unused == {
            "model.layers.4.mlp.up_proj.weight": "the model that config.json describes has no such tensor"
        }
        assert source.run.optimizer.precision == "fp32", "what holds both halves"
        assert source.read("blocks.0.mlp.up.weight").dtype == torch.bfloat16
        (strange, several, named) = source.report.notes
    assert "1 tensors are no part of the model" in strange and "model.layers.4.mlp.up_proj.weight" in strange
    assert "1 of torch.bfloat16" in several and "config.json says float16, the tensors are torch.float32" in named


def test_a_tied_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it is the embedding; beside it, it has to be equal."""
    folder = saved(CASES["bloom, 12 heads"], tmp_path / "x")
    with open_source(folder) as source:
        expected = source.read("embedding.word.weight").clone()
    changed(
        folder,
        lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.word_embeddings.weight"].clone()}),
    )
    with open_source(folder) as source:
        assert torch.equal(source.read("embedding.word.weight"), expected)
        assert "compared" in source.report.unused["lm_head.weight"]
    changed(folder, lambda tensors: tensors.pop("transformer.word_embeddings.weight"))
    with open_source(folder) as source:
        assert torch.equal(source.read("embedding.word.weight"), expected) and not source.report.unused
    changed(folder, lambda tensors: tensors.update({"word_embeddings.weight": tensors["lm_head.weight"] + 1e-3}))
    assert "lm_head.weight differs from the embedding, but config.json says tie_word_embeddings" in refusal(
        folder, "embedding.word.weight"
    )
    monkeypatch.setattr("megazero.convert.hf.reader._ROWS", 16)
    changed(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["word_embeddings.weight"][:16].clone()}))
    assert "lm_head.weight differs from the embedding" in refusal(folder, "embedding.word.weight")


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    folder = saved(CASES["gpt2, inner width"], tmp_path / "x", max_shard_size="40KB")
    first, *_ = sorted(folder.glob("model-*"))
    first.rename(folder / "elsewhere")
    assert f"lacks 1 of its {len(list(folder.glob('model-*'))) + 1} files: {first.name}" in refusal(folder)
    first.write_bytes((folder / "elsewhere").read_bytes()[:-40])
    assert f"{first} is no whole safetensors file" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../x"}}')
    assert recognise(folder) == "hf" and "'../x'" in refusal(folder)
    index.write_text('{"weight_map"')
    assert recognise(folder) == "hf" and f"{index} is no JSON" in refusal(folder)
    index.unlink()
    with pytest.raises(ConversionError, match="known format"):
        open_source(folder)


@pytest.mark.parametrize(
    ("name", "room"),
    [("model.safetensors", 1 << 26), ("model.safetensors", 5 << 28), ("pytorch_model.bin", 1 << 26)],
)
def test_a_file_that_is_not_mapped_is_not_blamed(name: str, room: int, tmp_path: Path) -> None:
    """A GiB where this process may have less memory; safetensors maps a file twice, with a call of its own and with
    torch's.
    """
    folder, size = saved(CASES["opt"], tmp_path / "x"), 1 << 30
    (folder / "model.safetensors").unlink()
    header = json.dumps({"a": {"dtype": "I8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(folder / name, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        message = refusal(folder, "")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    begin = (
        f"{folder / name} has {(folder / name).stat().st_size:,} bytes, and the system does not map them into memory"
    )
    assert message.startswith(begin) and "Cannot allocate memory" in message and "ulimit -v" in message


def written(model: ModelConfig, folder: Path, options: TargetOptions | None = None, **facts: Any) -> Any:
    """The source that a run of megazero's own would be, written as a folder."""
    source = made(model, precision="fp64", dtype=torch.float64)
    source.run = replace(source.run, **facts)
    folder.mkdir()
    write_hf(source, folder, options or TargetOptions(), lambda count: None)
    return source


OWN = FRESH | {
    "gpt2, inner": replace(
        FRESH["gpt2"], ffn_hidden_size=70, activation="gelu", norm_epsilon=1e-3, max_position_embeddings=40
    ),
    "opt, gelu": replace(
        FRESH["opt"], activation="gelu-tanh", disable_bias_linear=True, untie_embeddings_and_output_weights=True
    ),
    "llama, biases": replace(FRESH["llama"], attention_bias=True, num_query_groups=3, kv_channels=6, rotary_base=300.0),
    "bloom, untied": replace(FRESH["bloom"], untie_embeddings_and_output_weights=True, norm_epsilon=1e-4),
}


@pytest.mark.parametrize("name", OWN)
def test_a_model_of_our_own_in_transformers(name: str, tmp_path: Path) -> None:
    """Logits in float64 of what transformers makes of the folder are those of the stage."""
    source = written(OWN[name], tmp_path / "x", data=DataConfig(eod_id=4))
    stage = Stage(ModelLayout(source.model, single_rank_group(), torch.float64), whole_model(source.model))
    fill_stages([stage], source)
    ids = torch.randint(0, 90, (2, 20), generator=torch.Generator().manual_seed(3))
    with in_float64(), torch.no_grad():
        theirs, told = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(
            tmp_path / "x", dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
        expected = theirs(ids).logits
        ours = stage.eval().logits(None, MicroBatch(ids, ids, None, torch.arange(2))).transpose(0, 1)
    assert not any(told.values()), told
    assert expected.dtype == torch.float64 and theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 4
    assert ((ours - expected).abs().max() / expected.abs().max()).item() < (1e-9 if name.startswith("bloom") else 1e-12)


def test_what_a_config_has_no_key_for_is_told(tmp_path: Path) -> None:
    source = written(replace(FRESH["llama"], hidden_dropout=0.1), tmp_path / "x")
    assert any("has no key for it: --hidden-dropout is 0.1, not 0.0" in note for note in source.report.notes)


TEXT = "def f(x):\n    return x + 1  # naïve 数 \U0001f600 it's\n\n"


def same_tokenizer(folder: Path, ours: Tokenizer) -> None:
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT)
    assert theirs.decode(ours.encode(TEXT)) == TEXT
    assert theirs.eos_token_id == ours.eod_id and len(theirs) == ours.vocab_size


def test_tokenizers_that_go_with_it(tmp_path: Path) -> None:
    model = FRESH["gpt2"]
    written(model, tmp_path / "byte", data=DataConfig(tokenizer="byte"))
    same_tokenizer(tmp_path / "byte", build_tokenizer("byte", None))
    train_bpe([TEXT * 3, "some more words, some more words"], 300, tmp_path / "bpe", lambda line: None)
    written(model, tmp_path / "gpt2", data=DataConfig(tokenizer="gpt2", tokenizer_path=str(tmp_path / "bpe")))
    same_tokenizer(tmp_path / "gpt2", build_tokenizer("gpt2", str(tmp_path / "bpe")))
    written(model, tmp_path / "hf", data=DataConfig(tokenizer="hf", tokenizer_path=str(tmp_path / "gpt2")))
    same_tokenizer(tmp_path / "hf", build_tokenizer("hf", str(tmp_path / "gpt2")))
    nowhere = DataConfig(tokenizer="hf", tokenizer_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConversionError, match=r"--tokenizer-path .*nowhere, which is not there; --without-tokenizer"):
        written(model, tmp_path / "gone", data=nowhere)
    gone = written(model, tmp_path / "waived", TargetOptions(without_tokenizer=True), data=nowhere)
    assert any("no tokenizer is known" in note for note in gone.report.notes)
    assert not (tmp_path / "waived" / "tokenizer_config.json").exists()


def test_files_are_carried_along(tmp_path: Path) -> None:
    """An opened folder's tokenizer is the run's; through megazero's own format and back every file is the same."""
    folder = saved(CASES["gpt2, inner width"], tmp_path / "x")
    written(FRESH["gpt2"], tmp_path / "byte", data=DataConfig(tokenizer="byte"))
    carried = ("tokenizer.json", "tokenizer_config.json")
    for name in carried:
        shutil.copy(tmp_path / "byte" / name, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": [5, 6]}))
    with open_source(folder) as source:
        assert source.run.data.tokenizer == "hf" and source.run.data.eod_id == 5
        (tmp_path / "mine").mkdir()
        write_hf(source, tmp_path / "mine", TargetOptions(), lambda count: None)
    for name in (*carried, "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "mine" / name).read_bytes() == (folder / name).read_bytes()


def test_a_model_of_chats_ends_its_answers_in_transformers_too(tmp_path: Path) -> None:
    """Whose configuration names only the token that ends a document would go on behind its answer and ask itself the
    next question.
    """
    transformers = pytest.importorskip("transformers")
    tokenizer = write_tokenizer(tmp_path / "chats")
    known = HuggingFaceTokenizer(tokenizer / "tokenizer.json")
    turn, data = known.id_of("<|im_end|>"), DataConfig(tokenizer="hf", tokenizer_path=str(tokenizer), eod_id=1)
    assert turn is not None
    model = replace(FRESH["gpt2"], vocab_size=turn + 1)
    written(model, tmp_path / "talks", data=data)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "talks")
    assert (theirs.generation_config.eos_token_id, theirs.config.eos_token_id) == ([1, turn], 1)
    cut = written(replace(model, vocab_size=turn), tmp_path / "without", data=data)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "without").eos_token_id == 1, cut.report.notes
