"""What the recipes of examples/hub take on three machines, as the planner predicts it: commands and tables.

A recipe is a file of settings. A run is that file with the flags that fit another model to another machine.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from megazero.config.inventory import parameters
from megazero.config.model_shape import shape_settings
from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigSource
from megazero.mpu.axes import axes_of
from megazero.plan.flops import step_flops, trained_parameters
from megazero.plan.step_memory import TierPeaks, run_peaks

FOLDER = "examples/hub"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Machine:
    """gigabytes: of each rank, of 10^9 bytes. kind: of its device, cpu or cuda."""

    name: str
    gigabytes: int
    ranks: int
    kind: str


MACHINES = MappingProxyType(
    {
        "laptop": Machine("a laptop with 16 GB", 16, 1, "cpu"),
        "card": Machine("a card of 24 GB", 24, 1, "cuda"),
        "node": Machine("8 cards of 80 GB", 80, 8, "cuda"),
    }
)

# Name on the Hub -> the preset that has its shape.
SHAPES = MappingProxyType(
    {
        "Qwen/Qwen3-0.6B": "qwen3-0.6b",
        "Qwen/Qwen3-0.6B-Base": "qwen3-0.6b",
        "Qwen/Qwen3-1.7B-Base": "qwen3-1.7b",
        "Qwen/Qwen3-4B-Base": "qwen3-4b",
        "Qwen/Qwen3-8B": "qwen3-8b",
        "Qwen/Qwen3-14B": "qwen3-14b",
        "Qwen/Qwen3-32B": "qwen3-32b",
        "HuggingFaceTB/SmolLM3-3B": "smollm3-3b",
        "meta-llama/Llama-3.1-8B": "llama3-8b",
        "meta-llama/Llama-3.1-8B-Instruct": "llama3-8b",
        "meta-llama/Llama-3.3-70B-Instruct": "llama3-70b",
    }
)


@dataclass(frozen=True)
class RecipeRun:
    """A recipe on a machine. words: the flags behind the file."""

    recipe: str
    place: str
    words: str = ""

    @property
    def machine(self) -> Machine:
        return MACHINES[self.place]

    @property
    def command(self) -> str:
        start = "megazero pretrain"
        if self.machine.ranks > 1:
            start = f"torchrun --nproc-per-node {self.machine.ranks} pretrain_gpt.py"
        return f"{start} --config {FOLDER}/{self.recipe}.yaml {self.words}".rstrip()

    @cached_property
    def run(self) -> Run:
        """The run of its command, without the Hub: the model's shape is that of a preset."""
        flags = ["--config", str(ROOT / FOLDER / f"{self.recipe}.yaml"), *shlex.split(self.words)]
        return parse_run(flags, self.machine.ranks, shape_of)

    @property
    def model(self) -> str:
        return str(self.run.checkpoint.init_from)

    @cached_property
    def peaks(self) -> TierPeaks:
        """The bytes of its fullest rank."""
        every = run_peaks(self.run, axes_of(self.run, self.machine.ranks), self.machine.kind)
        return max(every, key=lambda peaks: peaks.device_bytes)

    @property
    def taken(self) -> int:
        """The bytes of a rank that its machine's gigabytes have to hold."""
        return self.peaks.total_bytes if self.machine.kind == "cpu" else self.peaks.device_bytes

    @property
    def flops(self) -> float:
        """The model's operations of a step on a rank, which a step's line of the log counts too."""
        return self.run.schedule.global_batch_size * step_flops(self.run) / self.machine.ranks

    @property
    def checkpoint_bytes(self) -> int:
        """Of a checkpoint: master weights and two moments in 32 bits of what is trained."""
        run = self.run
        return 12 * (parameters(run.model) if run.lora.lora_rank is None else trained_parameters(run))

    @property
    def memory(self) -> str:
        """The bytes of a rank as a cell: of the machine's gigabytes, of host memory beside a card, and on disks."""
        parts = [_gigabytes(self.taken)]
        if self.machine.kind != "cpu" and self.peaks.host_bytes:
            parts.append(f"host {_gigabytes(self.peaks.host_bytes)}")
        if self.peaks.disk:
            parts.append(f"disk {_gigabytes(self.peaks.disk)}")
        return ", ".join(parts)


def shape_of(name: str) -> ConfigSource:
    """What --init-from reads from the files of a model of `SHAPES`. The tokenizer is no part of the arithmetic."""
    shape = shape_settings(parse_run(["--preset", SHAPES[name], "--data-path", "my-text"], None).model)
    return ConfigSource(f"--init-from {name}", shape | {"tokenizer": "hf", "tokenizer_path": name, "eod_id": 0})


_LLAMA = "--init-from meta-llama/Llama-3.{} --eod-id 128009"
_LLAMA_8B, _LLAMA_70B = (_LLAMA.format(size) for size in ("1-8B-Instruct", "3-70B-Instruct"))
_HOST, _DISK = ("--offload-optimizer cpu --late-update", "--offload-optimizer nvme --nvme-path . --late-update")
_SPLIT = "--tp 8 --sequence-parallel"

RUNS = (
    RecipeRun("continue", "laptop"),
    RecipeRun("continue", "card", f"--init-from Qwen/Qwen3-1.7B-Base --seq-length 4096 {_HOST}"),
    RecipeRun(
        "continue",
        "node",
        "--init-from meta-llama/Llama-3.1-8B --seq-length 8192 --global-batch-size 64 --zero-stage 1",
    ),
    RecipeRun("tune", "laptop"),
    RecipeRun("tune", "card", f"--init-from HuggingFaceTB/SmolLM3-3B --seq-length 2048 {_HOST}"),
    RecipeRun("tune", "node", f"--init-from Qwen/Qwen3-32B --seq-length 4096 --lr 5e-6 {_SPLIT}"),
    RecipeRun("lora", "laptop", "--init-from HuggingFaceTB/SmolLM3-3B"),
    RecipeRun("lora", "card"),
    RecipeRun("lora", "card", f"{_LLAMA_8B} --seq-length 2048"),
    RecipeRun("lora", "node", f"{_LLAMA_70B} --seq-length 4096 --lr 1e-4 {_SPLIT}"),
    RecipeRun("qlora", "laptop", f"{_LLAMA_8B} --seq-length 1024"),
    RecipeRun("qlora", "card"),
    RecipeRun("qlora", "node", f"{_LLAMA_70B} --seq-length 4096 --lr 1e-4"),
)
"""What fits, with a model that uses the machine well."""

_TOO_LARGE = (
    ("continue", "laptop", "--init-from Qwen/Qwen3-1.7B-Base", _DISK),
    (
        "continue",
        "card",
        f"--init-from Qwen/Qwen3-4B-Base {_HOST}",
        "--offload-gradients cpu --micro-batch-order vertical",
    ),
    ("tune", "node", f"{_LLAMA_70B} --seq-length 4096 {_SPLIT}", _HOST),
    ("lora", "laptop", "--init-from Qwen/Qwen3-8B", "--lora-base-bits 4"),
    ("lora", "card", "--init-from Qwen/Qwen3-14B", "--lora-base-bits 4"),
    ("qlora", "card", "--init-from Qwen/Qwen3-32B", "--seq-length 1024 --offload-optimizer cpu --late-update"),
)
TOO_LARGE = tuple(
    (RecipeRun(recipe, place, words), RecipeRun(recipe, place, f"{words} {more}"), more)
    for recipe, place, words, more in _TOO_LARGE
)
"""What does not fit, the same with more flags, which fits, and these flags."""


def recipe(name: str) -> str:
    """The commands of a recipe, and what each takes."""
    runs = [run for run in RUNS if run.recipe == name]
    commands = "\n".join(f"# {run.machine.name}: {run.model}\n{_folded(run.command)}" for run in runs)
    return "\n".join([f"```sh\n{commands}\n```\n", _row(*COLUMNS), "|---" * len(COLUMNS) + "|", *map(_cells, runs)])


COLUMNS = ("machine", "model", "memory of a rank", "tokens of a step", "TFLOP of a rank", "a checkpoint")


def _cells(run: RecipeRun) -> str:
    """The row of a run under `COLUMNS`."""
    tokens = f"{run.run.schedule.global_batch_size} x {run.run.model.seq_length:,}"
    work, checkpoint = f"{run.flops / 1e12:,.0f}", _gigabytes(run.checkpoint_bytes)
    return _row(run.machine.name, run.model.split("/")[1], run.memory, tokens, work, checkpoint)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def too_large() -> str:
    """A table of what does not fit, by how much, and with which flags it does."""
    rows = [
        f"| {run.machine.name} | `{run.recipe}.yaml {run.words}` | {run.memory} | "
        f"{_gigabytes(run.taken - run.machine.gigabytes * 10**9)} | `{more}` | {smaller.memory} |"
        for run, smaller, more in TOO_LARGE
    ]
    head = "| machine | run | memory of a rank | too much | fits with | memory then |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows])


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _folded(command: str) -> str:
    """The command in lines, a flag and its first word on the same."""
    joined = re.sub(r"(--\S+) (?!--)", "\\1\0", command)
    lines = textwrap.wrap(joined, 110, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines).replace("\0", " ")
