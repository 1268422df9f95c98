"""What DeepSpeed and Megatron-core have written, for `make test`, which installs neither: small checkpoints in
`written_there/`, and in `written_there.json` what these programs say is in them.

    python -m tests.convert.written_there     # lets the programs write them again; needs what make test-all installs
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.config.schema import ModelConfig
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.megatron.registered import FORMAT
from megazero.convert.megatron_deepspeed.writer import write_megatron_deepspeed
from megazero.data.progress import silent
from tests.convert.megatron_core import BY_NAME, load_and_tell, open_ours, train_and_save
from tests.convert.sources import BLOOM, Made, made
from tests.convert.test_megatron import GPT, LLAMA
from tests.ranks import run_ranks

FOLDER = Path(__file__).with_name("written_there")
RECORDED = Path(__file__).with_name("written_there.json")
PROGRAMS = ("deepspeed", "megatron-core", "torch")
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "vocab_size": 21, "seq_length": 8}
POSITIONS = slice(1, None, 6)
"""Of a text those whose logits are kept."""


class Saved(NamedTuple):
    """How Megatron-core has saved: the model, the number of ranks, its layout, and arguments of `train_and_save`."""

    model: ModelConfig
    ranks: int
    tp: int
    pp: int
    kind: str
    sharding: str = BY_NAME


_GPT = replace(GPT, **SMALL, ffn_hidden_size=32, max_position_embeddings=8)
_LLAMA = replace(LLAMA, **SMALL, max_position_embeddings=8)
SAVED: Mapping[str, Saved] = {
    "gpt-tp2": Saved(_GPT, 2, 2, 1, "plain"),
    "llama-pp2": Saved(_LLAMA, 2, 1, 2, "plain"),
    "gpt-distributed": Saved(_GPT, 2, 1, 1, "distributed"),
    "llama-own-layout": Saved(_LLAMA, 1, 1, 1, "distributed", "dp_reshardable"),
    "gpt-torch": Saved(_GPT, 1, 1, 1, "torch"),
}
UNIVERSAL = "deepspeed-universal"
"""What DeepSpeed's ds_to_universal has made of a checkpoint of eight ranks."""
COMPUTED = {"gpt": GPT, "llama": LLAMA}
"""Models whose logits Megatron-core has computed."""


def universal_source() -> Made:
    return made(replace(BLOOM, **SMALL, num_attention_heads=2), precision="bf16", moments=True)


def unpacked(name: str, folder: Path) -> Path:
    """A recorded checkpoint, in a folder."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as packed:
        packed.extractall(folder / name)
    return folder / name


def recorded() -> dict[str, Any]:
    """{"versions": of the programs, "held": {name: {column: {parameter: digest}}}, "logits": {name: [[..]]}}"""
    return dict(json.loads(RECORDED.read_text()))


def digest(tensor: Tensor, name: str, model: ModelConfig) -> str:
    """Of a parameter by Megatron-core's name: its shape and its values in fp32; of a table the rows that are tokens."""
    rows = model.vocab_size if "word_embeddings" in name or "output_layer" in name else tensor.shape[0]
    whole = tensor[:rows].detach().float().contiguous()
    data = whole.flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(whole.shape)}".encode() + data).hexdigest()[:16]


def _pack(name: str, folder: Path) -> None:
    """Pack a folder without what differs between two runs of the same program."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as packed:
        for path in sorted(folder.iterdir()):
            packed.add(path, path.name, filter=plain)


def _held(saved: Saved, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Let Megatron-core save; returns what it says is there: loaded by one rank of it, or held by one that has taken
    the same steps alone.
    """
    model, layout = saved.model, (saved.tp, saved.pp)
    told = run_ranks(saved.ranks, train_and_save, str(folder), model, *layout, saved.kind, saved.sharding)
    if saved.kind == "plain":
        (told,) = [run_ranks(1, load_and_tell, str(folder), model)]
    elif saved.ranks > 1:
        told = run_ranks(1, train_and_save, str(folder.with_name("alone")), model, 1, 1, "plain")
    return dict(told[0])


def _make_universal(folder: Path) -> None:
    """Let DeepSpeed make a universal checkpoint of what is written here."""
    write_megatron_deepspeed(universal_source(), folder / "zero", TargetOptions(tp=2, pp=2, dp=2), lambda count: None)
    words: dict[str, Any] = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
    }
    words |= {"inject_missing_state": False, "input_folder": str(folder / "zero" / "global_step7")}
    words["output_folder"] = str(folder / UNIVERSAL / "global_step7_universal")
    program = "import argparse; from deepspeed.checkpoint import ds_to_universal as made; made.main(argparse.Namespace("
    program += f"**{words!r}))"
    (folder / UNIVERSAL).mkdir()
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    found: dict[str, Any] = {"versions": {name: version(name) for name in PROGRAMS}, "held": {}, "logits": {}}
    for name, saved in SAVED.items():
        with tempfile.TemporaryDirectory() as folder:
            held = _held(saved, Path(folder) / name)
            _pack(name, Path(folder) / name)
        found["held"][name] = {
            column: {key: digest(tensor, key, saved.model) for key, tensor in tensors.items()}
            for column, tensors in held.items()
        }
    for name, model in COMPUTED.items():
        with tempfile.TemporaryDirectory() as folder:
            convert(made(model), FORMAT, Path(folder) / "ours", TargetOptions(), silent)
            (logits,) = run_ranks(1, open_ours, f"{folder}/ours", model, 1, 1, f"{folder}/theirs")
        kept = logits[..., : model.vocab_size].reshape(model.seq_length, -1)[POSITIONS]
        found["logits"][name] = [[float(f"{value:.8g}") for value in row] for row in kept.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        _make_universal(Path(folder))
        _pack(UNIVERSAL, Path(folder) / UNIVERSAL)
    RECORDED.write_text(json.dumps(found, separators=(",", ":")).replace("},", "},\n").replace("],", "],\n") + "\n")


if __name__ == "__main__":
    main()
