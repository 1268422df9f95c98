"""GGUF files as gguf's own reader and transformers read them: every tensor, the metadata and the tokenizer."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megazero.cli import convert as command
from megazero.config.layers.pattern import LayerPattern
from megazero.config.rotary import RotaryScaling
from megazero.config.schema import DataConfig, ModelConfig
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.gguf.architectures import ARCHITECTURES
from megazero.convert.gguf.vocabulary import vocabulary_in
from megazero.convert.hf.families import FAMILIES
from megazero.convert.registry import target_table
from megazero.convert.source import ConversionError, Source
from megazero.data.progress import silent
from megazero.data.train_bpe import train_bpe
from tests.convert.sources import AS_LLAMA, made

gguf: Any = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")

BLOOM = ModelConfig(
    num_layers=2,
    hidden_size=96,
    num_attention_heads=3,
    vocab_size=97,
    make_vocab_size_divisible_by=8,
    seq_length=16,
    embedding_layernorm=True,
    norm_epsilon=3e-5,
)
GPT2 = replace(BLOOM, position_embedding="learned", embedding_layernorm=False, max_position_embeddings=24)
LLAMA = replace(
    BLOOM,
    num_attention_heads=4,
    embedding_layernorm=False,
    ffn_hidden_size=160,
    rotary_base=5e5,
    max_position_embeddings=40,
    **AS_LLAMA,
)
TIED = replace(LLAMA, untie_embeddings_and_output_weights=False, attention_bias=True, kv_channels=10)
MODELS = {"bloom": BLOOM, "gpt2": GPT2, "llama": LLAMA, "llama, tied, biased, own head width": TIED}
ALONE = TargetOptions(without_tokenizer=True)


def written(source: Source, folder: Path, options: TargetOptions = ALONE) -> Any:
    """A reader of the file that the source becomes."""
    convert(source, target_table()["gguf"], folder, options, silent)
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    return gguf.GGUFReader(folder / "model.gguf")


def value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def in_transformers(source: Source, folder: Path) -> dict[str, torch.Tensor]:
    convert(source, target_table()["hf"], folder, ALONE, silent)
    return load_file(folder / "model.safetensors")


def turned(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp turns row 2i of a head with row 2i + 1, transformers row i with row i + d/2."""
    rows, width = [], len(tensor) // heads
    for head in range(heads):
        for row in range(width // 2):
            rows += [tensor[head * width + row], tensor[head * width + row + width // 2]]
    return torch.stack(rows)


def expected(kind: str, model: ModelConfig, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The file's tensors from those of transformers: names and layouts written out by hand."""
    made: dict[str, torch.Tensor] = {}
    names = {
        "bloom": {
            "word_embeddings_layernorm": "token_embd_norm",
            "word_embeddings": "token_embd",
            "input_layernorm": "attn_norm",
            "query_key_value": "attn_qkv",
            "dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "dense_h_to_4h": "ffn_up",
            "dense_4h_to_h": "ffn_down",
            "ln_f": "output_norm",
        },
        "gpt2": {
            "wte": "token_embd",
            "wpe": "position_embd",
            "ln_1": "attn_norm",
            "c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
            "ln_f": "output_norm",
        },
        "llama": {
            "embed_tokens": "token_embd",
            "input_layernorm": "attn_norm",
            "q_proj": "attn_q",
            "k_proj": "attn_k",
            "v_proj": "attn_v",
            "o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "gate_proj": "ffn_gate",
            "up_proj": "ffn_up",
            "down_proj": "ffn_down",
            "norm": "output_norm",
            "lm_head": "output",
        },
    }[kind]
    for key, tensor in theirs.items():
        *path, end = key.split(".")
        theirs_name = next(name for name in names if path[-len(name.split(".")) :] == name.split("."))
        block = next((f"blk.{part}." for part in path if part.isdigit()), "")
        if kind == "gpt2" and end == "weight" and theirs_name.split(".")[-1].startswith("c_"):
            tensor = tensor.T
        if theirs_name in ("q_proj", "k_proj"):
            heads = model.num_attention_heads if theirs_name == "q_proj" else model.num_query_groups
            assert heads is not None
            tensor = turned(tensor, heads)
        if theirs_name == "query_key_value":
            width = model.hidden_size // model.num_attention_heads
            places = [(head, part) for part in range(3) for head in range(model.num_attention_heads)]
            tensor = torch.cat([tensor[(3 * head + part) * width :][:width] for head, part in places])
        made[f"{block}{names[theirs_name]}.{end}"] = tensor
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, "q8_0"], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_the_models(name: str, dtype: Any, tmp_path: Path) -> None:
    model, kind = MODELS[name], name.split(",")[0]
    source = made(model)
    options = TargetOptions(quantized=dtype) if dtype == "q8_0" else TargetOptions(dtype=dtype)
    reader = written(source, tmp_path / "out", replace(options, without_tokenizer=True))
    wanted = expected(kind, model, in_transformers(source, tmp_path / "hf"))
    assert {tensor.name for tensor in reader.tensors} == wanted.keys() and len(reader.tensors) == len(wanted)
    types = set()
    for tensor in reader.tensors:
        exact = wanted[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == tuple(exact.shape), tensor.name
        types.add(tensor.tensor_type.name)
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).reshape(exact.shape)
        if exact.dim() == 1 or tensor.name == "position_embd.weight":
            assert tensor.tensor_type.name == "F32" and torch.equal(values, exact), tensor.name
        elif tensor.tensor_type.name == "Q8_0":
            blocks = exact.reshape(-1, 32)
            # Half a step of the block's scale; the scale itself is rounded to 16 bits: 127 steps of 2^-11 of one.
            bound = blocks.abs().amax(1, keepdim=True) / 127 * (0.5 + 127 * 2.0**-11)
            error = (values.reshape(-1, 32) - blocks).abs()
            assert (error <= bound).all() and error.amax() > 0, tensor.name
        elif dtype == "q8_0":
            assert exact.shape[-1] % 32 and torch.equal(values, exact.half().float()), tensor.name
        else:
            assert torch.equal(values, exact.to(dtype).float()), tensor.name
    matrices = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", "q8_0": "Q8_0"}[dtype]
    assert {matrices, "F32"} <= types


def test_metadata(tmp_path: Path) -> None:
    common = {"context_length": 16, "embedding_length": 96, "block_count": 2, "attention.head_count": 3}
    common |= {"feed_forward_length": 384, "vocab_size": 97}
    bloom = common | {"attention.head_count_kv": 3, "attention.layer_norm_epsilon": 3e-5}
    gpt2 = common | {"context_length": 24, "attention.layer_norm_epsilon": 3e-5}
    llama = common | {
        "context_length": 40,
        "feed_forward_length": 160,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 3e-5,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 24,
        "rope.freq_base": 5e5,
    }
    for name, numbers in {"bloom": bloom, "gpt2": gpt2, "llama": llama}.items():
        reader = written(made(MODELS[name]), tmp_path / name)
        assert value(reader, "general.architecture") == name
        kept = {key.removeprefix(f"{name}."): value(reader, key) for key in reader.fields if key.startswith(f"{name}.")}
        assert kept == pytest.approx(numbers), name
        assert value(reader, "tokenizer.ggml.model") == "no_vocab"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama"])
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    """Its reader of GGUF undoes what the file lays out in another way, by code of its own."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    train_bpe(["the cat sat on the mat"], 262, tmp_path / "bpe", silent, chat=False)
    # transformers takes a GPT-2 of any file for one with 1,024 positions.
    source = made(replace(MODELS[name], vocab_size=262, max_position_embeddings=1024))
    source.run = replace(source.run, data=DataConfig(tokenizer="gpt2", tokenizer_path=str(tmp_path / "bpe")))
    written(source, tmp_path / "out", TargetOptions())
    convert(source, target_table()["hf"], tmp_path / "hf", TargetOptions(), silent)
    opened = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"),
    ]
    ids = torch.arange(3, 15)[None]
    logits = [model(ids).logits for model in opened]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def with_tokenizer(kind: str, path: Path | None, vocabulary: int) -> Source:
    source = made(replace(GPT2, vocab_size=vocabulary))
    data = DataConfig(tokenizer=kind, tokenizer_path=None if path is None else str(path))
    source.run = replace(source.run, data=data)
    return source


@pytest.mark.parametrize("chat", [False, True])
def test_merges_of_bytes(chat: bool, tmp_path: Path) -> None:
    train_bpe(["the cat sat on the mat"], 262, tmp_path / "bpe", silent, chat=chat)
    reader = written(with_tokenizer("hf" if chat else "gpt2", tmp_path / "bpe", 270), tmp_path / "out", TargetOptions())
    tokens, types = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    if chat:
        made_of = json.loads((tmp_path / "bpe" / "tokenizer.json").read_text())
        vocab = made_of["model"]["vocab"] | {token["content"]: token["id"] for token in made_of["added_tokens"]}
    else:
        vocab = json.loads((tmp_path / "bpe" / "vocab.json").read_text())
    assert {token: tokens.index(token) for token in vocab} == vocab
    assert len(tokens) == len(types) == 270 and tokens[-1] == "[PAD269]" and types[-1] == 5
    assert types[vocab["<|endoftext|>"]] == 3 and types[vocab["a"]] == 1
    assert value(reader, "tokenizer.ggml.eos_token_id") == vocab["<|endoftext|>"]
    assert (value(reader, "tokenizer.ggml.model"), value(reader, "tokenizer.ggml.pre")) == ("gpt2", "gpt-2")
    merges = value(reader, "tokenizer.ggml.merges")
    assert merges and all("".join(pair.split(" ")) in vocab for pair in merges)
    assert value(reader, "tokenizer.ggml.add_bos_token") is False
    template = tmp_path / "bpe" / "chat_template.jinja"
    if chat:
        settings = json.loads((tmp_path / "bpe" / "tokenizer_config.json").read_text())
        stored = template.read_text() if template.is_file() else settings["chat_template"]
        assert value(reader, "tokenizer.chat_template") == stored
        assert tokens[value(reader, "tokenizer.ggml.eot_token_id")] == "<|im_end|>"
    else:
        assert "tokenizer.chat_template" not in reader.fields


def test_bytes(tmp_path: Path) -> None:
    reader = written(with_tokenizer("byte", None, 257), tmp_path / "out", TargetOptions())
    tokens = value(reader, "tokenizer.ggml.tokens")
    assert len(tokens) == 257 and tokens[ord("a")] == "a" and tokens[ord(" ")] == "Ġ" and tokens[256] == "<|endoftext|>"
    assert value(reader, "tokenizer.ggml.eos_token_id") == 256


@pytest.mark.parametrize(("kind", "model"), [("bpe", "llama"), ("unigram", "t5")])
def test_sentencepiece(kind: str, model: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: pip install sentencepiece")
    made_model = io.BytesIO()
    text = iter([f"the cat sat on mat {number} and a dog ran after two of them" for number in range(50)])
    library.SentencePieceTrainer.train(
        sentence_iterator=text, model_writer=made_model, vocab_size=30, model_type=kind, minloglevel=2
    )
    (tmp_path / "tokenizer.model").write_bytes(made_model.getvalue())
    processor = library.SentencePieceProcessor(model_proto=made_model.getvalue())
    source = with_tokenizer("sentencepiece", tmp_path / "tokenizer.model", 32)
    reader = written(source, tmp_path / "out", TargetOptions())
    tokens, scores = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.scores")
    assert tokens[:30] == [processor.id_to_piece(number) for number in range(30)] and tokens[30:] == [
        "[PAD30]",
        "[PAD31]",
    ]
    np.testing.assert_allclose(scores[:30], [processor.get_score(number) for number in range(30)], rtol=1e-6)
    types = value(reader, "tokenizer.ggml.token_type")
    assert types[processor.unk_id()] == 2 and types[processor.bos_id()] == 3 and types[29] == 1 and types[31] == 5
    assert value(reader, "tokenizer.ggml.model") == model and value(reader, "tokenizer.ggml.add_space_prefix") is True


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused(tmp_path: Path) -> None:
    cut = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}
    others = ({"type": "Whitespace"}, cut | {"add_prefix_space": True}, cut | {"use_regex": False})
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": cut}))
    vocabulary = vocabulary_in(tmp_path)
    assert vocabulary is not None and vocabulary.merges == ("a b",) and vocabulary.pre == "gpt-2"
    for other in others:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": other}))
        with pytest.raises(ConversionError, match=r"llama.cpp's name for it is not known; --without-tokenizer"):
            vocabulary_in(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model | {"type": "WordPiece"}}))
    with pytest.raises(ConversionError, match="WordPiece"):
        vocabulary_in(tmp_path)


def test_what_llama_cpp_does_not_compute_is_refused(tmp_path: Path) -> None:
    opt = replace(GPT2, activation="relu", position_offset=2, norm_epsilon=1e-5)
    for model, options, reason in (
        (opt, ALONE, "does not compute models of the family opt"),
        (replace(GPT2, activation="relu"), ALONE, "gpt2 is another model: --activation"),
        (replace(LLAMA, rotary_scaling=RotaryScaling.parsed("linear factor=2")), ALONE, "--rotary-scaling is linear"),
        (replace(LLAMA, layer_pattern=LayerPattern.parsed("window:4")), ALONE, "--layer-pattern is window:4"),
        (GPT2, replace(ALONE, dtype=torch.float64), "nearest: --dtype fp32"),
    ):
        with pytest.raises(ConversionError, match=reason):
            convert(made(model), target_table()["gguf"], tmp_path / "out", options, silent)
    with pytest.raises(ConversionError, match="q8_0: hf has no such blocks"):
        convert(made(GPT2), target_table()["hf"], tmp_path / "out", replace(ALONE, quantized="q8_0"), silent)
    with pytest.raises(ConversionError, match="has 262 tokens, and the model 97"):
        train_bpe(["the cat"], 262, tmp_path / "bpe", silent, chat=False)
        written(with_tokenizer("gpt2", tmp_path / "bpe", 97), tmp_path / "out", TargetOptions())
    assert not (tmp_path / "out").exists()


def test_without_the_package_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConversionError, match=r"pip install 'megazero\[gguf\]'"):
        convert(made(GPT2), target_table()["gguf"], tmp_path / "out", ALONE, silent)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(made(LLAMA), target_table()["megazero"], tmp_path / "ours", TargetOptions(), silent)
    words = [str(tmp_path / "ours"), "--to", "gguf", "--output", str(tmp_path / "out"), "--dtype", "q8_0"]
    assert (
        command.main([*words, "--verify"]) == 2 and "--verify: gguf is written and not read" in capsys.readouterr().err
    )
    assert command.main(words) == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert value(reader, "general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0


def test_each_row_is_a_family_and_an_architecture() -> None:
    for model_type, row in ARCHITECTURES.items():
        assert model_type in FAMILIES or model_type == "mistral"  # which is read as llama
        assert getattr(gguf.MODEL_ARCH, row.name) in gguf.MODEL_TENSORS
