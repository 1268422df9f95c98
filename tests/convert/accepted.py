"""What is written for other programs, from fixed numbers. Each of these programs has read it, in `make test-all`.

`accepted.json` has a digest of every file that was read: of its structure, and of every tensor in it, bit for bit. So
`make test` needs none of the programs to see that the same is written still. What they read has to be asked again, in
`make test-all`, when a writer changes:

    python -m tests.convert.accepted     # runs those tests, and records the digests if they pass
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.config.schema import ModelConfig
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.megatron_deepspeed.stages import plan
from megazero.convert.megatron_deepspeed.writer import write_megatron_deepspeed
from megazero.convert.registry import format_table
from megazero.data.progress import silent
from tests.convert.sources import BLOOM, Made, made
from tests.convert.test_megatron import GPT
from tests.convert.test_megatron import LLAMA as MEGATRON_LLAMA
from tests.convert.test_megatron_deepspeed import LLAMA as GATED
from tests.convert.test_universal import BLOOM as UNIVERSAL_BLOOM
from tests.convert.test_universal import LLAMA as UNIVERSAL_LLAMA

RECORDED = Path(__file__).with_name("accepted.json")
PROGRAMS = ("deepspeed", "megatron-core", "torch")
_READERS = ("deepspeed_reads", "deepspeed_pipeline", "universal_deepspeed", "megatron_core")
READERS = tuple(f"test_{name}.py" for name in _READERS)
"""The tests in which the programs read it."""


def trained(model: ModelConfig) -> Made:
    """A source with what a run in bf16 has."""
    return made(model, precision="bf16", moments=True)


THREE_LAYERS = replace(BLOOM, num_layers=3, hidden_size=16, num_attention_heads=4)
TIED = replace(BLOOM, hidden_size=16, num_attention_heads=4, vocab_size=256)
UNTIED = replace(TIED, num_layers=3, untie_embeddings_and_output_weights=True)
EIGHT = TargetOptions(tp=2, pp=2, dp=2)
SOURCES: Mapping[str, Callable[[], Made]] = {
    "three layers": lambda: trained(THREE_LAYERS),
    "gated": lambda: trained(GATED),
    "tied": lambda: trained(TIED),
    "untied": lambda: trained(UNTIED),
    "bloom": lambda: trained(replace(UNIVERSAL_BLOOM, num_attention_heads=4)),
    "llama": lambda: trained(UNIVERSAL_LLAMA),
    "weights of gpt": lambda: made(GPT),
    "weights of llama": lambda: made(MEGATRON_LLAMA),
}
WRITTEN: Mapping[str, tuple[str, str, TargetOptions]] = {
    "parallel": ("three layers", "megatron-deepspeed", EIGHT),
    "single": ("three layers", "megatron-deepspeed", TargetOptions(dp=3)),
    "gated": ("gated", "megatron-deepspeed", EIGHT),
    "tied-tp2-pp2": ("tied", "megatron-deepspeed", TargetOptions(tp=2, pp=2)),
    "untied-pp2-dp2": ("untied", "megatron-deepspeed", TargetOptions(pp=2, dp=2)),
    "universal": ("bloom", "universal", TargetOptions()),
    "llama": ("llama", "universal", TargetOptions()),
    "consolidated": ("bloom", "consolidated", TargetOptions()),
    "zero-files": ("bloom", "megatron-deepspeed", EIGHT),
    "megatron-gpt": ("weights of gpt", "megatron", TargetOptions()),
    "megatron-llama": ("weights of llama", "megatron", TargetOptions()),
    "megatron-gpt-tp2-pp2": ("weights of gpt", "megatron", TargetOptions(tp=2, pp=2)),
    "megatron-llama-tp2": ("weights of llama", "megatron", TargetOptions(tp=2)),
}
"""By name the source, the format, and the ranks that it is written for."""


def write(name: str, folder: Path) -> Made:
    """Write one of `WRITTEN` into a folder that does not exist yet; returns its source."""
    source_name, format_name, options = WRITTEN[name]
    source = SOURCES[source_name]()
    if format_name == "megatron-deepspeed":
        write_megatron_deepspeed(source, folder, options, lambda count: None)
    else:
        convert(source, format_table()[format_name], folder, options, silent)
    return source


class Named:
    """Stands for an object of a program that need not be installed."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("deepspeed", "megatron"):
            return type(f"{module}.{name}", (Named,), {})
        return super().find_class(module, name)


_PICKLES: Any = SimpleNamespace(
    __name__="pickle", Unpickler=_Unpickler, load=pickle.load, UnpicklingError=pickle.UnpicklingError
)


def digests(folder: Path) -> dict[str, str]:
    """By the path of each file below a folder the digest of what is in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files}


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    if path.suffix in (".pt", ".bin"):
        for piece in _pieces(torch.load(path, pickle_module=_PICKLES, weights_only=False)):
            found.update(piece)
    else:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[bytes]:
    """What is in a file, in its order: kinds, keys, numbers, and the bytes of tensors."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"{type(value).__name__} {len(value)}".encode()
        for key, held in value.items():
            yield repr(key).encode()
            yield from _pieces(held)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} {len(value)}".encode()
        for held in value:
            yield from _pieces(held)
    elif isinstance(value, argparse.Namespace):
        yield from _pieces(vars(value))
    elif hasattr(value, "__dict__"):
        yield type(value).__name__.encode()
        yield from _pieces(vars(value))
    else:
        yield repr(value).encode()


def balances(ends: int) -> dict[tuple[tuple[int, ...], int], int]:
    """(weights of a pipeline's layers, number of stages) -> number of blocks. ends: the weight of the embedding and of
    the head, 1 where they are tied.
    """
    return {
        (tuple([0, ends, 0] + [1] * blocks + [0, 0, ends]), pp): blocks
        for blocks in range(1, 12)
        for pp in range(1, blocks + 2 * ends + 1)
    }


def begins(model: ModelConfig, weights: Sequence[int], pp: int) -> list[int]:
    """The weight before each stage, as it is cut here."""
    return [sum(weights[: stage.start]) for stage in plan(model, TargetOptions(pp=pp)).stages]


def _balanced_there(ends: int) -> list[list[int]]:
    """The weight before each stage, as DeepSpeed cuts it: for each of `balances` in order."""
    from deepspeed.runtime.utils import partition_balanced

    cases = balances(ends)
    return [[sum(weights[:start]) for start in partition_balanced(weights, pp)[:-1]] for weights, pp in cases]


def recorded() -> dict[str, Any]:
    """{"versions": of the programs, "files": {name in `WRITTEN`: {path: digest}}, "begins": {ends: those there}}."""
    return dict(json.loads(RECORDED.read_text()))


def main() -> int:
    tests = [str(Path(__file__).with_name(name)) for name in READERS]
    if failed := pytest.main(["-q", "--depth", "all", *tests]):
        return int(failed)
    found: dict[str, Any] = {"versions": {name: version(name) for name in PROGRAMS}, "files": {}}
    for name in WRITTEN:
        with tempfile.TemporaryDirectory() as folder:
            write(name, Path(folder) / name)
            found["files"][name] = digests(Path(folder) / name)
    found["begins"] = {str(ends): _balanced_there(ends) for ends in (0, 1)}
    RECORDED.write_text(json.dumps(found, separators=(",", ":")).replace("},", "},\n").replace("],", "],\n") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
