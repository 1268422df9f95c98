"""The targets of the fuzzer: readers, their inputs, and the errors with which they may refuse."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megazero.checkpoint.format import CheckpointError
from megazero.config.dump import dump
from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.convert.files.torch_dist import DistributedCheckpoint
from megazero.convert.hf.config import ends_of_generation
from megazero.convert.inspection import open_for_inspection
from megazero.convert.registry import open_source
from megazero.convert.source import ConversionError
from megazero.data.cache import FACTS, cached_arrays
from megazero.data.chat import has_template
from megazero.data.conversations import ConversationEncoder, read_conversations
from megazero.data.documents import text_of
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.input_files import ReaderOptions
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.preprocess import raw_batches
from megazero.data.progress import silent
from megazero.data.tokenizer import ByteTokenizer, build_tokenizer
from megazero.data.tokenizer_record import path_of, read_tokenizer_record, tokenizer_record
from megazero.data.writer import PairWriter
from megazero.inference.prompts import read_prompts
from tests.data.chats import CHATML, HEADERS, INSTRUCT, PLAIN, chat, write_tokenizer
from tests.fuzz import folders

CACHED: tuple[str, dict[str, Any]] = ("order", {"seed": 3})
ARRAYS: dict[str, NDArray[Any]] = {
    "shuffle_index": np.arange(9, dtype=np.uint32),
    "sample_index": np.arange(12).reshape(6, 2),
    "none": np.empty((0, 2), np.int32),
}


@dataclass(frozen=True)
class Target:
    """read: opens `path` and uses all of it. seeds: whole files, or of each the part that is changed. is_json: the
    seeds are JSON.
    whole: what makes a file of such a part. errors: by which it may refuse. dear: one file is drawn here for so many
    elsewhere.
    """

    read: Callable[[], object]
    path: Path
    seeds: Sequence[bytes]
    errors: type[Exception] | tuple[type[Exception], ...]
    is_json: bool = False
    whole: Callable[[bytes], bytes] = bytes
    dear: int = 1

    def give(self, data: bytes) -> None:
        """Put this before the reader. Raises what it should not."""
        self.path.write_bytes(self.whole(data))
        try:
            self.read()
        except self.errors as error:
            assert str(error), "an error without a word"


def _settings(flag: str, path: Path) -> None:
    parse_run([flag, str(path)], 1)


def _texts(path: Path, kind: str) -> None:
    reader = ReaderOptions(format=kind)
    for _, batch in raw_batches([path], reader):
        for raw in batch:
            text_of(raw, "text", "strict")


def _conversations(path: Path) -> None:
    for _ in read_conversations([path], ConversationEncoder(ByteTokenizer(), 256, 257), silent):
        pass


def _tokenizer(kind: str, path: Path) -> None:
    tokenizer = build_tokenizer(kind, str(path))
    tokenizer.decode(tokenizer.encode("ab a word"))


def _chats(path: Path, tokenizer: Path) -> None:
    """Conversations with a tokenizer's template, to learn from and to answer."""
    built = build_tokenizer("hf", str(tokenizer))
    assert isinstance(built, HuggingFaceTokenizer)
    encoder = ConversationEncoder(built, None, built.vocab_size)
    for _ in read_conversations([path], encoder, silent):
        pass
    for template in encoder.templates.values() if has_template(built) else ():
        built.encode(template.question([{"role": "user", "content": "<s> two"}]))


def _cached(root: Path) -> None:
    """A damaged cache is never an error: it is made again."""
    arrays = cached_arrays(root, *CACHED, lambda _: ARRAYS, silent)
    assert all(
        np.array_equal(arrays[name][:], value) and arrays[name].dtype == value.dtype for name, value in ARRAYS.items()
    )


def _pair(prefix: Path) -> None:
    data = IndexedDataset(prefix)
    data.check()
    for number in range(len(data)):
        data[number].sum()


def _source(path: Path) -> None:
    with open_source(path) as source:
        ends_of_generation(source.companions, 16)
        for name in source.entries:
            for column in source.columns:
                source.read(name, column)


def _inspected(path: Path) -> None:
    with open_for_inspection(path) as found:
        found.verify(1, lambda count: None)


def _distributed(path: Path) -> None:
    found = DistributedCheckpoint(path)
    for name in found.tensors:
        found.read(name)


def settings_targets(folder: Path) -> dict[str, Target]:
    nested = (
        b"model:\n  num_layers: 2\n  hidden_size: &a 24\n  ffn_hidden_size: *a\nvocab_size: 99\nseed: "
        b"3\ndata_path: [0.5, a, 0.5, b]\nsave: 2024-01-02\n"
    )
    deepspeed = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_type": "linear"},
        },
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "gradient_clipping": 1.0,
        "tensorboard": {"enabled": True, "output_path": "runs"},
    }
    yaml, ds = folder / "run.yaml", folder / "ds.json"
    return {
        "yaml": Target(partial(_settings, "--config", yaml), yaml, (dump(Run()).encode(), nested), ConfigError),
        "deepspeed_json": Target(
            partial(_settings, "--deepspeed-config", ds),
            ds,
            (json.dumps(deepspeed).encode(),),
            ConfigError,
            is_json=True,
        ),
    }


def data_targets(folder: Path) -> dict[str, Target]:
    import zstandard

    text = b'{"text": "one", "id": 1}\n\n{"text": "two \\ud83d\\ude00", "more": {"a": [1, 2]}}\n'
    talk = (
        b'{"prompt": "a", "completion": "b"}\n{"messages": [{"role": "user", "content": "x"}, {"role": '
        b'"assistant", '
        b'"content": "y"}]}\n'
    )
    shapes = (
        b'{"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": ""}',
        b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": []}',
    )
    packs: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }
    found = {
        f"jsonl{ending}": Target(partial(_texts, path, "jsonl"), path, (pack(text), text), DataError)
        for ending, pack in packs.items()
        for path in (folder / f"x.jsonl{ending}",)
    }
    chats, prompts, prefix = folder / "chats.jsonl", folder / "prompts.jsonl", folder / "pair"
    with PairWriter(prefix, np.dtype("<u2")) as writer:
        writer.write(np.arange(9, dtype="<u2"), [4, 0, 5])
    path_of(prefix).write_bytes(tokenizer_record(ByteTokenizer(), "byte").written())
    cache = folder / "cache"
    _cached(cache)
    (kept,) = cache.glob("order-*[!k]")
    found |= {
        "tokenizer_record": Target(
            partial(read_tokenizer_record, prefix),
            path_of(prefix),
            (path_of(prefix).read_bytes(),),
            DataError,
            is_json=True,
        ),
        "cache_facts": Target(partial(_cached, cache), kept / FACTS, ((kept / FACTS).read_bytes(),), (), is_json=True),
        "cache_array": Target(
            partial(_cached, cache), kept / "sample_index.npy", ((kept / "sample_index.npy").read_bytes(),), ()
        ),
        "text.zst": Target(
            partial(_texts, folder / "x.txt.zst", "text"), folder / "x.txt.zst", (packs[".zst"](text),), DataError
        ),
        "conversations": Target(partial(_conversations, chats), chats, (talk, *talk.splitlines(), *shapes), DataError),
        "prompts": Target(partial(read_prompts, (), str(prompts)), prompts, (b'"a"\n{"prompt": "b"}\n',), DataError),
        "idx": Target(partial(_pair, prefix), Path(f"{prefix}.idx"), (Path(f"{prefix}.idx").read_bytes(),), DataError),
    }
    return found


def tokenizer_targets(folder: Path) -> dict[str, Target]:
    gpt2, hf, model = folders.gpt2(folder), folder / "tokenizer.json", folder / "x.model"
    vocab, merges = gpt2 / "vocab.json", gpt2 / "merges.txt"
    return {
        "gpt2_vocab": Target(
            partial(_tokenizer, "gpt2", _copy(gpt2, "v")),
            folder / "v" / vocab.name,
            (vocab.read_bytes(),),
            DataError,
            is_json=True,
        ),
        "gpt2_merges": Target(
            partial(_tokenizer, "gpt2", _copy(gpt2, "m")), folder / "m" / merges.name, (merges.read_bytes(),), DataError
        ),
        "tokenizer_json": Target(partial(_tokenizer, "hf", hf), hf, folders.tokenizers(), DataError, is_json=True),
        "sentencepiece": Target(
            partial(_tokenizer, "sentencepiece", model), model, (folders.sentencepiece_model(folder),), DataError
        ),
    }


def chat_targets(folder: Path) -> dict[str, Target]:
    """The files beside a tokenizer, each in a folder of its own that is whole but for it.

    Each look starts a template's process.
    """
    whole, talk = write_tokenizer(folder / "whole", template=None), folder / "talk.jsonl"
    talk.write_text(json.dumps(chat("one", "two <|im_end|>", "three", "four")) + "\n")
    config, special = whole / "tokenizer_config.json", whole / "special_tokens_map.json"
    told = json.loads(config.read_text())
    special.write_text(
        json.dumps(
            {
                "eos_token": "<|im_end|>",
                "bos_token": {"content": "<s>", "lstrip": False},
                "additional_special_tokens": ["<s>"],
            }
        )
    )
    several = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": PLAIN}]
    seeds: dict[str, list[bytes]] = {
        config.name: [json.dumps(told | {"chat_template": template}).encode() for template in (PLAIN, several)],
        special.name: [special.read_bytes()],
        "chat_template.jinja": [template.encode() for template in (CHATML, PLAIN, HEADERS, INSTRUCT)],
    }
    found = {}
    for name, wholes in seeds.items():
        place = _copy(whole, Path(name).stem)
        if name == special.name:
            (place / "chat_template.jinja").write_text(PLAIN)
        found[Path(name).stem] = Target(
            partial(_chats, talk, place), place / name, wholes, DataError, name.endswith("json"), dear=4
        )
    return found


def _copy(folder: Path, name: str) -> Path:
    """A folder like this one, of which one target may damage a file."""
    import shutil

    return shutil.copytree(folder, folder.parent / name)


def checkpoint_targets(folder: Path) -> dict[str, Target]:
    """Of every format each kind of its files, in a folder of its own that is whole but for it."""
    from tests.convert.distributed import save
    from tests.fuzz.files import FILES

    formats = "megazero hf megatron megatron-deepspeed universal consolidated consolidated-safetensors"
    wholes = {
        format: folders.checkpoint(folder, format, moments=format in ("megazero", "megatron-deepspeed", "universal"))
        for format in formats.split()
    }
    wholes |= folders.sharded(wholes["hf"], folder)
    wholes["torch_dist"] = folders.torch_dist(folder)
    (folder / "lora").mkdir()
    wholes["peft"] = folders.adapters(folder / "lora")
    found = {}
    for name, known in FILES.items():
        place = _copy(wholes[known.format], name)
        (path,) = sorted(place.rglob(known.pattern))[:1]
        found[name] = Target(
            partial(_source, place), path, [known.part(path)], (ConversionError,), known.is_json, known.whole(path)
        )
    native = _copy(wholes["megazero"], "inspected")
    (inside,) = native.glob("iter_*/manifest.json")
    errors = (CheckpointError, ValueError)
    found["inspected"] = Target(
        partial(_inspected, native), inside, [folders.unsealed(inside)], errors, True, folders.manifest
    )
    save({"a": torch.ones(3), "b": torch.arange(12.0).view(3, 4), "n": 3}, folder / "dist", {})
    metadata = folder / "dist" / ".metadata"
    found["torch_dist"] = Target(
        partial(_distributed, folder / "dist"), metadata, (metadata.read_bytes(),), ConversionError
    )
    return found


def all_targets(folder: Path) -> dict[str, Target]:
    """The targets by name. folder: an empty folder that they may fill."""
    makers = {
        "settings": settings_targets,
        "data": data_targets,
        "tokenizers": tokenizer_targets,
        "chats": chat_targets,
        "checkpoints": checkpoint_targets,
    }
    found: dict[str, Target] = {}
    for name, make in makers.items():
        (folder / name).mkdir()
        found |= make(folder / name)
    return found
