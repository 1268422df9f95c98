"""The command `megazero`: its first word names a subcommand, the other words are the flags of the subcommand.

A subcommand is imported only when it is called, because most of them import torch, which takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megazero import __version__
from megazero.cli.exit_status import say, status_of, working_folder_is_gone
from megazero.config.options import did_you_mean
from megazero.system.status import MISTAKEN
from megazero.telemetry.console import open_streams


class Subcommand(NamedTuple):
    """A row of the table. script: how the same program is started in a clone. sentence: its line in the help."""

    script: str
    sentence: str


SUBCOMMANDS: Mapping[str, Subcommand] = MappingProxyType(
    {
        "pretrain": Subcommand("pretrain_gpt.py", "train a model, from scratch, a checkpoint or adapters"),
        "prepare-data": Subcommand("tools/preprocess_data.py", "text into a .bin/.idx pair"),
        "merge-data": Subcommand("tools/merge_data.py", "several pairs into one"),
        "train-tokenizer": Subcommand("tools/train_tokenizer.py", "a byte-level BPE of your own text"),
        "inspect-data": Subcommand("tools/inspect_data.py", "what a pair holds, and what a run reads of it"),
        "convert": Subcommand("tools/convert_checkpoint.py", "a checkpoint of any known format into any other"),
        "export": Subcommand("tools/export_model.py", "weights of a model of your own modules, as one file"),
        "inspect": Subcommand("tools/inspect_checkpoint.py", "what is inside a checkpoint, how two differ"),
        "generate": Subcommand("tools/generate_text.py", "text from a trained model"),
        "evaluate": Subcommand("tools/evaluate.py", "loss and perplexity of a model on documents"),
        "harness": Subcommand("python -m megazero.harness", "a model in the LM Evaluation Harness"),
        "report": Subcommand("tools/report.py", "a run on one page of HTML, or several runs beside each other"),
        "plan": Subcommand("tools/plan.py", "the best layouts of a run on a cluster, and what they take"),
        "plan-schedule": Subcommand("tools/show_schedule.py", "learning rate and batch at any iteration"),
        "draw-schedule": Subcommand("tools/draw_schedule.py", "a pipeline schedule and its bubble"),
        "verify-layout": Subcommand("tools/verify_layout.py", "proof that a layout computes what one process does"),
        "bench-nvme": Subcommand("tools/bench_nvme.py", "what a step reaches whose state is on a disk"),
        "doctor": Subcommand("python -m megazero.doctor", "what this machine and installation offer"),
    }
)
"""The subcommands by name."""

SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "chat": "generate MODEL --chat --interactive",
        "finetune": "pretrain --init-from MODEL --instruction-data FILE",
        "sft": "pretrain --init-from MODEL --instruction-data FILE",
        "lora": "pretrain --init-from MODEL --lora-rank 16",
        "tokenize": "prepare-data",
        "run": "pretrain",
    }
)
"""Names of other programs' commands, without dashes -> the command that does the same here."""

ABOUT_DATA = frozenset({"prepare-data", "merge-data", "train-tokenizer", "inspect-data"})
"""Commands that share the module `data_commands`. Every other command is the module of its name."""

MAKE_FILES = frozenset({"convert", "export", "prepare-data", "merge-data", "train-tokenizer"})
"""Commands whose result is files, so that they need no standard output."""

HELP_WORDS = "-h", "--help", "help"
USAGE = "usage: megazero COMMAND [flags]\n       megazero COMMAND --help\n       megazero --version"
EXAMPLES = """examples:
  megazero pretrain --ranks 2 --tp 2 --train-iters 20
  torchrun --nproc-per-node 8 -m megazero pretrain --tp 2 --pp 2 --save runs/mine
  megazero generate runs/mine --prompt "def main("

A cluster starts `-m megazero pretrain` on every rank by torchrun. The programs are also scripts of a clone, as in
`python tools/generate_text.py`."""


def help_text() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {command.sentence}" for name, command in SUBCOMMANDS.items()]
    return "\n".join([USAGE, "", "commands:", *lines, "", EXAMPLES])


def load_program(name: str) -> Callable[[Sequence[str]], int]:
    """The function that is a command, imported now: the `main` of its module, which for data takes its name first."""
    if name in ABOUT_DATA:
        return partial(import_module("megazero.cli.data_commands").main, name)
    program: Callable[[Sequence[str]], int] = import_module(f"megazero.cli.{name.replace('-', '_')}").main
    return program


def unknown_command_message(name: str) -> str:
    """The message for an unknown command, which suggests the command whose script has that name, a synonym, or a
    command spelled alike.
    """
    # A script of a clone may be typed with its folder and ending, as in `megazero tools/merge_data.py`.
    name_alone = name.removesuffix(".py").rpartition("/")[2].replace("_", "-")
    by_script = {Path(command.script).stem.replace("_", "-"): known for known, command in SUBCOMMANDS.items()}
    suggestion = by_script.get(name_alone) or SYNONYMS.get(name_alone.replace("-", ""))
    hint = f"; did you mean {suggestion}?" if suggestion else did_you_mean(name_alone, SUBCOMMANDS)
    return f"megazero: there is no command {name!r}{hint} (megazero --help lists them all)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names and return its status; 2 if there is no such command."""
    if working_folder_is_gone():
        return MISTAKEN
    name, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    # `megazero help convert` means `megazero convert --help`.
    if name == "help" and flags and flags[0] not in HELP_WORDS:
        name, *flags = flags[0], "--help", *flags[1:]
    if name in SUBCOMMANDS:
        # Before `status_of`, for which a closed standard output is an error, as it is for a help.
        if name in MAKE_FILES and not {"-h", "--help"} & {*flags}:
            open_streams()
        return status_of(lambda: load_program(name)(flags))
    if name in HELP_WORDS:
        say(help_text())
        return 0
    if name == "--version":
        say(f"megazero {__version__}")
        return 0
    print(unknown_command_message(name) if name else f"{USAGE}\n\nmegazero: name a command", file=sys.stderr)
    return MISTAKEN
