"""GGUF files as gguf's own reader and transformers read them: every tensor, the metadata and the tokenizer."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megazero.cli import convert as command
from megazero.config.layers.pattern import LayerPattern, RotarySet
from megazero.config.options import build_run
from megazero.config.presets import presets
from megazero.config.rotary import RotaryScaling
from megazero.config.schema import DataConfig, ModelConfig
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.gguf.architectures import ARCHITECTURES
from megazero.convert.gguf.vocabulary import vocabulary_in
from megazero.convert.hf.config import family_for, new_config
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
QWEN3 = replace(LLAMA, query_key_norm="head", kv_channels=32)
GEMMA2 = replace(
    LLAMA,
    num_layers=3,
    activation="geglu-tanh",
    untie_embeddings_and_output_weights=False,
    norm_placement="both",
    norm_plus_one=True,
    embedding_multiplier=96**0.5,
    attention_cap=45.0,
    logits_cap=25.0,
    layer_pattern=LayerPattern.parsed("window:6, full"),
)
GEMMA3 = replace(
    GEMMA2,
    num_layers=8,
    query_key_norm="head",
    attention_cap=None,
    logits_cap=None,
    rotary_sets=(RotarySet.parsed("local"),),
    layer_pattern=LayerPattern.parsed("window:6 local x5, full"),
)
NEOX = replace(
    BLOOM,
    position_embedding="rotary",
    rotary_share=0.25,
    rotary_base=2e4,
    embedding_layernorm=False,
    parallel_block="two-norms",
    untie_embeddings_and_output_weights=True,
)
SCALES: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "attention_scale": 0.1,
    "logits_multiplier": 0.125,
}
MODELS = {
    "bloom": BLOOM,
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama, tied, biased, own head width": TIED,
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "olmo2": replace(LLAMA, norm_placement="after", query_key_norm="all"),
    "phi3": replace(LLAMA, rotary_share=0.75),
    "smollm3": replace(LLAMA, num_layers=5, layer_pattern=LayerPattern.parsed("full x3, full none, full")),
    "granite": replace(LLAMA, **SCALES),
    "gptneox": NEOX,
}
ALONE = TargetOptions(without_tokenizer=True)


def written(source: Source, folder: Path, options: TargetOptions = ALONE) -> Any:
    """A reader of the file that the source becomes."""
    convert(source, target_table()["gguf"], folder, options, silent)
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    return gguf.GGUFReader(folder / "model.gguf")


def value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def scaled(model: ModelConfig, scaling: str) -> ModelConfig:
    return replace(model, rotary_scaling=RotaryScaling.parsed(scaling))


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
    both = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
    gemma = both | {"pre_feedforward_layernorm": "ffn_norm"}
    of_heads = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
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
        "gptneox": {
            "embed_in": "token_embd",
            "input_layernorm": "attn_norm",
            "query_key_value": "attn_qkv",
            "dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "dense_h_to_4h": "ffn_up",
            "dense_4h_to_h": "ffn_down",
            "final_layer_norm": "output_norm",
            "embed_out": "output",
        },
    }
    further = {"gemma2": gemma, "gemma3": gemma | of_heads, "olmo2": both | of_heads, "qwen3": of_heads}
    further |= {"phi3": {"qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up"}}
    of_kind = names[kind] if kind in names else names["llama"] | further.get(kind, {})
    for key, tensor in theirs.items():
        *path, end = key.split(".")
        theirs_name = next(name for name in of_kind if path[-len(name.split(".")) :] == name.split("."))
        block = next((f"blk.{part}." for part in path if part.isdigit()), "")
        if kind == "gpt2" and end == "weight" and theirs_name.split(".")[-1].startswith("c_"):
            tensor = tensor.T
        if kind in ("gemma2", "gemma3") and "norm" in theirs_name:
            tensor = 1 + tensor
        if theirs_name in ("q_proj", "k_proj") and kind in ("llama", "smollm3", "granite"):
            heads = model.num_attention_heads if theirs_name == "q_proj" else model.num_query_groups
            assert heads is not None
            tensor = turned(tensor, heads)
        if theirs_name == "query_key_value":
            width = model.hidden_size // model.num_attention_heads
            places = [(head, part) for part in range(3) for head in range(model.num_attention_heads)]
            tensor = torch.cat([tensor[(3 * head + part) * width :][:width] for head, part in places])
        made[f"{block}{of_kind[theirs_name]}.{end}"] = tensor
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
    gemma2 = llama | {
        "block_count": 3,
        "attention.sliding_window": 6,
        "attn_logit_softcapping": 45.0,
        "final_logit_softcapping": 25.0,
    }
    neox = bloom | {"rope.dimension_count": 8, "rope.freq_base": 2e4, "use_parallel_residual": True}
    wider = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
    scales = {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.1, "logit_scale": 8.0}
    of_kinds = {
        "bloom": bloom,
        "gpt2": gpt2,
        "llama": llama,
        "qwen2": llama,
        "qwen3": llama | wider,
        "gemma2": gemma2,
        "gemma3": llama | {"block_count": 8, "attention.sliding_window": 6},
        "olmo2": llama,
        "phi3": llama | {"rope.dimension_count": 18, "attention.sliding_window": 0},
        "smollm3": llama | {"block_count": 5},
        "granite": llama | scales,
        "gptneox": {key: number for key, number in neox.items() if key != "attention.head_count_kv"},
    }
    for name, numbers in of_kinds.items():
        reader = written(made(MODELS[name]), tmp_path / name)
        assert value(reader, "general.architecture") == name
        kept = {key.removeprefix(f"{name}."): value(reader, key) for key in reader.fields if key.startswith(f"{name}.")}
        assert kept == pytest.approx(numbers), name
        assert value(reader, "tokenizer.ggml.model") == "no_vocab"


@pytest.mark.parametrize(("window", "context"), [(None, 40), (24, 16)])
def test_a_model_that_was_tuned_on_shorter_samples_keeps_its_context(
    window: int | None, context: int, tmp_path: Path
) -> None:
    """As in config.json; but a window that 16 tokens do not reach would hide some of 40, which llama.cpp's do not."""
    pattern = None if window is None else LayerPattern.parsed(f"window:{window}")
    was = replace(LLAMA, seq_length=40, max_position_embeddings=None, layer_pattern=pattern)
    source = made(replace(was, seq_length=16))
    family = family_for(was, "llama" if window is None else "mistral")
    (tmp_path / "config.json").write_text(json.dumps(new_config(family, made(was).run, torch.float32)))
    source.companions = {"config.json": tmp_path / "config.json"}
    assert value(written(source, tmp_path / "out"), "llama.context_length") == context


def test_the_language_model_of_pictures_and_text_keeps_its_context(tmp_path: Path) -> None:
    was = replace(GEMMA3, seq_length=40, max_position_embeddings=None)
    text = new_config(family_for(was, "gemma3_text"), made(was).run, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    source = made(replace(was, seq_length=16))
    source.companions = {"config.json": tmp_path / "config.json"}
    assert value(written(source, tmp_path / "out"), "gemma3.context_length") == 40


LLAMA3 = "llama3 factor=8 low_freq_factor=1 high_freq_factor=4 original_max_position_embeddings=64"
YARN = "yarn factor=4 original_max_position_embeddings=10"
DYNAMIC = "dynamic factor=2 original_max_position_embeddings=20"
LONG = "longrope short_factor=1,1.5,2 long_factor=2,3,4 original_max_position_embeddings=16 factor=4"


YARNS = {"type": "yarn", "factor": 4.0, "original_context_length": 10}
TURNS = 64 / (2 * math.pi * 6)
"""Times that the second of three pairs turns over the first 64 positions, with the base 216; the first turns more than
4 times and the third less than once.
"""
KEPT = (TURNS - 1) / 3
SIX = replace(LLAMA, kv_channels=6, rotary_base=216.0)
SCALED: dict[str, tuple[ModelConfig, str, dict[str, Any], dict[str, list[float]]]] = {
    "linear": (LLAMA, "linear factor=2.5", {"type": "linear", "factor": 2.5}, {}),
    "yarn": (MODELS["qwen2"], YARN, YARNS, {}),
    "yarn, factor of scores": (
        *(LLAMA, f"{YARN} attention_factor=1.5"),
        *(YARNS | {"attn_factor": 1.5 / (1 + 0.1 * math.log(4))}, {}),
    ),
    "llama3": (SIX, LLAMA3, {}, {"rope_freqs.weight": [1.0, 1 / (KEPT + (1 - KEPT) / 8), 8.0]}),
    "longrope": (
        *(SIX, LONG),
        {"type": "longrope", "original_context_length": 16, "attn_factor": 1.5**0.5},  # 1 + ln 4 / ln 16
        {"rope_factors_short.weight": [1.0, 1.5, 2.0], "rope_factors_long.weight": [2.0, 3.0, 4.0]},
    ),
}
"""Model, --rotary-scaling, the file's metadata of scaling and its divisors of pairs."""


@pytest.mark.parametrize("name", SCALED)
def test_scaled_positions(name: str, tmp_path: Path) -> None:
    model, scaling, metadata, divisors = SCALED[name]
    reader = written(made(scaled(model, scaling)), tmp_path / "out")
    beginning = f"{value(reader, 'general.architecture')}.rope.scaling."
    kept = {key.removeprefix(beginning): value(reader, key) for key in reader.fields if key.startswith(beginning)}
    assert kept.pop("type", None) == metadata.get("type")
    assert kept == pytest.approx({key: number for key, number in metadata.items() if key != "type"})
    stored = {tensor.name: tensor for tensor in reader.tensors if tensor.name.startswith("rope_")}
    assert {tensor.tensor_type.name for tensor in stored.values()} <= {"F32"}
    assert {key: tensor.data.tolist() for key, tensor in stored.items()} == {
        key: pytest.approx(numbers) for key, numbers in divisors.items()
    }


READABLE: dict[str, dict[str, Any]] = {
    "gpt2": {"max_position_embeddings": 1024},
    "bloom": {},
    "llama": {},
    "qwen2": {},
    "qwen3": {"kv_channels": 128},
    "gemma2": {"kv_channels": 256, "attention_cap": 50.0, "logits_cap": 30.0},
    "gemma3": {"kv_channels": 256, "rotary_base": 1e6},
    "phi3": {"rotary_share": 1.0, "vocab_size": 32064},
}
"""Fields whose values transformers takes for those of every GGUF file of a family, whatever the file says."""


@pytest.mark.slow
@pytest.mark.parametrize("name", READABLE)
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    """Its reader of GGUF undoes what the file lays out in another way, by code of its own."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    train_bpe(["the cat sat on the mat"], 262, tmp_path / "bpe", silent, chat=False)
    source = made(replace(MODELS[name], **{"vocab_size": 262, **READABLE[name]}))
    source.run = replace(source.run, data=DataConfig(tokenizer="gpt2", tokenizer_path=str(tmp_path / "bpe")))
    if name == "phi3":  # without this file a model that turns whole heads is written as a LLaMA
        (tmp_path / "config.json").write_text(json.dumps(new_config(FAMILIES[name], source.run, torch.float32)))
        source.companions = {"config.json": tmp_path / "config.json"}
    reader = written(source, tmp_path / "out", TargetOptions())
    assert value(reader, "general.architecture") == name
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


def patterned(model: ModelConfig, pattern: str) -> ModelConfig:
    return replace(model, layer_pattern=LayerPattern.parsed(pattern))


OTHER = {
    "llama, dynamic": (
        scaled(LLAMA, DYNAMIC),
        "--rotary-scaling is dynamic, not none or linear",
    ),
    "yarn's ramp": (scaled(LLAMA, f"{YARN} beta_fast=16"), "beta_fast=16 beta_slow=1 truncate=1, not beta_fast=32"),
    "mistral, windows": (patterned(LLAMA, "window:4"), "shorter than the context, is 4, not none"),
    "qwen2, windows": (patterned(MODELS["qwen2"], "full, window:39"), "is 39, not none"),
    "qwen2, llama3": (scaled(MODELS["qwen2"], LLAMA3), "--rotary-scaling is llama3, not none or linear or yarn"),
    "qwen3, biases": (replace(QWEN3, attention_bias=True), "--attention-bias is True, not False"),
    "gemma2, full first": (
        patterned(GEMMA2, "full, window:6"),
        "is full, window:6, not a window in all layers but",
    ),
    "gemma2, yarn": (scaled(GEMMA2, YARN), "--rotary-scaling is yarn, not none or linear$"),
    "gemma2, no cap": (replace(GEMMA2, attention_cap=None), "--attention-cap is none, not a number"),
    "gemma2, scores": (
        replace(GEMMA2, attention_scale=0.1),
        r"--attention-scale times the root .* is 0.4898\d*, not 1.0",
    ),
    "gemma2, scores of 46 layers": (
        replace(GEMMA2, num_layers=46, kv_channels=6),
        r"--hidden-size / heads\) is 2.0, not",
    ),
    "gemma3, cap": (replace(GEMMA3, logits_cap=30.0), "--logits-cap is 30.0, not None"),
    "gemma3, every fifth": (patterned(GEMMA3, "window:6 local x4, full"), "not a window in all layers but every 6"),
    "gemma3, local base": (
        replace(GEMMA3, rotary_sets=(RotarySet.parsed("local base=5000"),)),
        "local base=5000, not local$",
    ),
    "gemma3, gelu": (replace(GEMMA3, activation="geglu"), "--activation is geglu, not geglu-tanh"),
    "olmo2, tied": (
        replace(MODELS["olmo2"], untie_embeddings_and_output_weights=False),
        "--untie-embeddings-and-output-weights is False, not True",
    ),
    "phi3, windows": (patterned(MODELS["phi3"], "window:39"), "is 39, not none"),
    "smollm3, every third": (patterned(MODELS["smollm3"], "full x2, full none"), "is 3, not every 4"),
    "smollm3, biases": (replace(MODELS["smollm3"], mlp_bias=True), "--mlp-bias is True, not False"),
    "gpt-neox, tied": (replace(NEOX, untie_embeddings_and_output_weights=False), "is False, not True"),
    "gpt-neox, no biases": (replace(NEOX, attention_bias=False), "--attention-bias is False, not True"),
    "gpt-neox, relu": (replace(NEOX, activation="relu"), "--activation is relu, not gelu or gelu-tanh"),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_an_architecture_fixes_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model, reason = OTHER[name]
    with pytest.raises(ConversionError, match=reason) as refused:
        convert(made(model), target_table()["gguf"], tmp_path / "out", ALONE, silent)
    assert str(refused.value).count(" is ") == 2, "one requirement is broken, and the message names this one alone"


def test_what_hides_nothing_is_written(tmp_path: Path) -> None:
    """A window as long as the context, as Phi-4 mini's, and exact GELU of Pythia, which is reported."""
    for number, model in enumerate((patterned(LLAMA, "window:40"), patterned(MODELS["phi3"], "window:41"))):
        written(made(model), tmp_path / str(number))
    for activation, notes in (("gelu-tanh", 0), ("gelu", 1)):
        source = made(replace(NEOX, activation=activation))
        written(source, tmp_path / activation)
        problems = [note for note in source.report.notes if "--activation is gelu, not gelu-tanh" in note]
        assert len(problems) == notes


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


OF_TRAINING = "attention_dropout attn_pdrop embd_pdrop hidden_dropout initializer_range resid_pdrop"
OF_TENSORS = "attention_bias mlp_bias tie_word_embeddings"
OF_METADATA = (
    "attention_multiplier attn_logit_softcapping embedding_multiplier final_logit_softcapping head_dim hidden_size "
    "intermediate_size layer_norm_eps layer_norm_epsilon logits_scaling max_position_embeddings n_embd n_head n_inner "
    "n_layer n_positions num_attention_heads num_hidden_layers num_key_value_heads residual_multiplier rms_norm_eps "
    "rope_parameters seq_length sliding_window use_parallel_residual vocab_size"
)
FIXED = "activation_function hidden_act hidden_activation no_rope_layers query_pre_attn_scalar use_sliding_window"


def test_each_key_of_a_family_is_written_or_fixed() -> None:
    """A key that a family gets later is one that files would lose: it fails here until a row says or refuses it."""
    keys = {setting.keys[0] for model_type in ARCHITECTURES for setting in FAMILIES[model_type].settings}
    assert keys == {*OF_TRAINING.split(), *OF_TENSORS.split(), *OF_METADATA.split(), *FIXED.split()}


def test_presets_can_be_written() -> None:
    """What the requirements fix are the published models."""
    for name, settings in presets().items():
        model = build_run({"vocab_size": 50304, **settings}).model
        row = ARCHITECTURES[family_for(model).model_type]
        assert not [problem for need in row.needs for problem in need.problems(model)], name


def test_each_row_is_a_family_and_an_architecture() -> None:
    for model_type, row in ARCHITECTURES.items():
        assert model_type in FAMILIES
        assert getattr(gguf.MODEL_ARCH, row.name) in gguf.MODEL_TENSORS
