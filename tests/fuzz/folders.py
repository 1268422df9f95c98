"""Small whole files of every kind, written by the program itself. The fuzzer damages copies of them."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megazero.checkpoint.format import seal
from megazero.config.schema import ModelConfig
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.hf.config import GENERATION
from megazero.convert.hf.files import INDEX, SINGLE
from megazero.convert.registry import format_table
from megazero.data.progress import silent
from megazero.data.train_bpe import train_bpe
from tests.convert.sources import made
from tests.convert.test_torch_dist import save_dist

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=16,
    seq_length=8,
    embedding_layernorm=True,
    position_embedding="alibi",
)


def checkpoint(folder: Path, format: str, *, moments: bool = False) -> Path:
    """A checkpoint of one block in a format."""
    model = replace(MODEL, position_embedding="learned", embedding_layernorm=False) if format == "megatron" else MODEL
    source = made(model, moments=moments, precision="bf16" if moments else "fp32")
    convert(source, format_table()[format], folder / format, TargetOptions(), silent)
    if format == "hf":
        (folder / format / GENERATION).write_text(
            json.dumps({"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.7})
        )
    return folder / format


def sharded(whole: Path, folder: Path) -> dict[str, Path]:
    """A Hugging Face folder in two files with an index, of safetensors and of torch's own kind."""
    state = load_file(whole / SINGLE)
    names = sorted(state)
    shards = {"00001-of-00002": names[::2], "00002-of-00002": names[1::2]}
    kinds: dict[str, tuple[str, str, Callable[[Any, Path], None]]] = {
        "hf-shards": ("model-{}.safetensors", INDEX, save_file),
        "hf-torch": ("pytorch_model-{}.bin", "pytorch_model.bin.index.json", torch.save),
    }
    for kind, (form, index, save) in kinds.items():
        shutil.copytree(whole, folder / kind, ignore=lambda _, there: [SINGLE])
        for part, held in shards.items():
            save({name: state[name] for name in held}, folder / kind / form.format(part))
        told = {name: form.format(part) for part, held in shards.items() for name in held}
        (folder / kind / index).write_text(json.dumps({"metadata": {"total_size": 4096}, "weight_map": told}))
    return {kind: folder / kind for kind in kinds}


def torch_dist(folder: Path) -> Path:
    """A checkpoint as Megatron-core lays it out, with the optimizer's state."""
    model = replace(MODEL, position_embedding="learned", embedding_layernorm=False)
    save_dist(
        made(model, moments=True, precision="bf16"), folder / "torch_dist", optimizer="flat", dtype=torch.bfloat16
    )
    return folder / "torch_dist"


def adapters(folder: Path) -> Path:
    """Adapters as PEFT has them, on a Hugging Face folder beside them."""
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "base_model_name_or_path": str(checkpoint(folder, "hf")),
        "use_rslora": False,
    }
    (folder / "peft").mkdir()
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.transformer.h.0.self_attention.query_key_value"
    save_file(
        {f"{layer}.lora_A.weight": torch.ones(2, 8), f"{layer}.lora_B.weight": torch.ones(24, 2)},
        folder / "peft" / "adapter_model.safetensors",
    )
    return folder / "peft"


def gpt2(folder: Path) -> Path:
    """vocab.json and merges.txt."""
    train_bpe(["a word and another word, and one more"], 270, folder / "gpt2", silent)
    return folder / "gpt2"


def sentencepiece_model(folder: Path) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a word and another word", "one more"]),
        model_writer=model,
        vocab_size=24,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return model.getvalue()


def tokenizers() -> list[bytes]:
    """tokenizer.json of each kind of model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = {"a": 0, "b": 1, "ab": 2, "<s>": 3}
    kinds: list[Any] = [
        models.BPE(vocab, [("a", "b")], unk_token="<s>"),
        models.WordLevel(vocab, unk_token="<s>"),
        models.WordPiece(vocab, unk_token="<s>"),
        models.Unigram([("<s>", 0.0), ("a", -1.0), ("b", -2.0)], 0, False),
    ]
    found = []
    for model in kinds:
        made_of = Tokenizer(model)
        made_of.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        made_of.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
        made_of.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 3 if "ab" in made_of.get_vocab() else 0)]
        )
        made_of.decoder = decoders.WordPiece()
        made_of.add_special_tokens([AddedToken("<x>", special=True)])
        found.append(made_of.to_str().encode())
    return found


def sealed(content: bytes) -> bytes:
    """A manifest's content with the hash that it needs to be looked at."""
    return content + seal(content)


def unsealed(path: Path) -> bytes:
    """A manifest without its hash, as JSON of its own."""
    return path.read_bytes()[: -len(seal(b""))] + b"}"


def manifest(data: bytes) -> bytes:
    """The other way: what stands before the last bracket, sealed."""
    return sealed(data.rstrip().removesuffix(b"}"))


def header_of(path: Path) -> bytes:
    """The JSON of a safetensors file."""
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def with_header(path: Path) -> Callable[[bytes], bytes]:
    """A safetensors file with this payload and another header, whose length is right."""
    data = path.read_bytes()
    payload = data[8 + int.from_bytes(data[:8], "little") :]
    return lambda header: len(header).to_bytes(8, "little") + header + payload


def pickle_of(path: Path) -> bytes:
    """What lies in a file of torch.save as data.pkl."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def with_pickle(path: Path) -> Callable[[bytes], bytes]:
    """That file with another pickle, the archive around it whole."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}

    def whole(data: bytes) -> bytes:
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as written:
            for name, content in entries.items():
                written.writestr(name, data if name.endswith("data.pkl") else content)
        return target.getvalue()

    return whole


def arguments_of(path: Path) -> bytes:
    """The arguments in a Megatron file, as JSON."""
    args = torch.load(path, weights_only=False)["args"]
    held = args if isinstance(args, dict) else vars(args)
    return json.dumps(
        {key: value for key, value in held.items() if isinstance(value, int | float | str | bool | list | None)}
    ).encode()


def with_arguments(path: Path) -> Callable[[bytes], bytes]:
    """That file with other arguments."""
    state = torch.load(path, weights_only=False)

    def whole(data: bytes) -> bytes:
        target = io.BytesIO()
        try:
            found = json.loads(data)
        except ValueError:
            return data
        torch.save({**state, "args": Namespace(**found) if isinstance(found, dict) else found}, target)
        return target.getvalue()

    return whole
