"""The texts of `--help` and `--help-all`, made from the dataclasses and sorted by what a person wants to do with a run.

The sections of `Run` say where a setting stands in a file. A person who looks for a flag has a goal instead, and the
flags of one goal are often fields of several sections.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megazero.config.flags import SHORT_FORMS, CommandOptions, read_command_line
from megazero.config.options import Option, listed_options, options_of, run_options
from megazero.config.presets import presets
from megazero.config.tiers import FILE_TIERS


@dataclass(frozen=True)
class Invocation:
    """The commands that start training.

    one   on one rank
    many  on {ranks} ranks of this host
    more  on ranks of several hosts, or as a script
    """

    one: str
    many: str
    more: tuple[str, ...] = ()


COMMAND = Invocation(
    "megazero pretrain",
    "megazero pretrain --ranks {ranks}",
    ("torchrun --nproc-per-node N -m megazero pretrain", "torchrun --nproc-per-node N pretrain_gpt.py"),
)

EXAMPLES = (
    ("a small model on this machine, on data that every machine has", 1, "--train-iters 20"),
    ("the same on four ranks: two share each layer, two hold different layers", 4, "--tp 2 --pp 2 --train-iters 20"),
    (
        "your own text, saved every 100 steps; the same command resumes",
        8,
        "--preset bloom-560m --data-path my/corpus --tokenizer hf --tokenizer-path my/tokenizer "
        "--train-iters 1000 --save runs/mine --load runs/mine --save-interval 100",
    ),
    (
        "is this layout right for 384 GPUs?",
        1,
        "--preset bloom-176b --tp 4 --pp 12 --zero-stage 1 --validate-only --world-size 384",
    ),
)
"""(what the command does, number of ranks, flags)."""

_COMMAND = "command"
"""The section of `CommandOptions`, whose fields are no settings of a run."""
_COLUMN = 27
"""The column at which the sentences begin."""
_KEPT = "\u00a0"
"""A space at which lines are not broken."""

_ABOUT = (
    "Pretrain GPT-, BLOOM- and LLaMA-style language models with tensor, pipeline and data parallelism and ZeRO. "
    "Without any flag it trains 12 layers on the source of Python's standard library for 100 iterations or 10 minutes."
)
_MORE = "Most runs need these flags. --help-all shows the others too, which (+N) counts."
_RULES = (
    "Flags win over --config, that over --deepspeed-config, that over --preset, that over the defaults. Of a repeated "
    "flag the last one counts. A switch has a negation: --no-async-save. The word none resets a setting to its derived "
    "default: --rampup-batch-size none.",
    "Exit status: 0 finished or stopped as asked, 2 the configuration is wrong (one message lists every mistake), 1 "
    "anything else.",
)


def requested_help(argv: Sequence[str], program: Invocation = COMMAND) -> str | None:
    """The text for a command line with `--help` or `--help-all`; None for one without. Imports no torch."""
    command = read_command_line(argv).command
    if not (command.help or command.help_all):
        return None
    return help_text(program, everything=command.help_all)


def help_text(program: Invocation = COMMAND, *, everything: bool = False) -> str:
    """The help text: the flags that most runs need, or with `everything` all that are listed, by what they are for."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    ways = (program.one, program.many.format(ranks="N"), *program.more)
    lines = [f"{'       ' if number else 'usage: '}{way} [flags]" for number, way in enumerate(ways)] + [""]
    lines += _filled(_ABOUT if everything else f"{_ABOUT} {_MORE}", width)
    before: list[Option] = []
    for heading, options in _groups():
        shown = [known for known in options if known.common or everything]
        left = len(options) - len(shown)
        more = f" (+{left})" if left else ""
        lines += [""] * bool(shown or before)
        lines += _filled(f"{heading}{more}", width)
        before = shown
        for known in shown:
            command = known.section == _COMMAND
            lines += _entry(_left(known), _right(known, value=not command, aliases=everything), width)
    last, rules = (_presets(width), (_unlisted(), *_RULES)) if everything else (_examples(program, width), _RULES)
    return "\n".join([*lines, "", *last, "", *(line for rule in rules for line in _filled(rule, width)), ""])


def _groups() -> Iterator[tuple[str, Sequence[Option]]]:
    """(heading, options) in the order of the help."""
    yield "what to do, and where settings come from", options_of(CommandOptions, _COMMAND)
    listed = listed_options()
    for goal in GOALS:
        fields = goal.all_fields({name: known.section for name, known in listed.items()})
        yield goal.heading, [listed[name] for name in fields]


def _entry(left: str, right: str, width: int) -> list[str]:
    """An entry in two columns. A long left one has a line of its own."""
    wrapped = _filled(right, width - _COLUMN)
    first = [f"  {left:<{_COLUMN - 2}}{wrapped.pop(0)}"] if len(left) <= _COLUMN - 4 else [f"  {left}"]
    return [*first, *(" " * _COLUMN + line for line in wrapped)]


def _left(known: Option) -> str:
    """The flag and its value: `--tp N`, `-h, --help`."""
    flags = ", ".join([*(alias for alias in known.aliases if not alias.startswith("--")), known.flag])
    if known.kind is bool:
        return flags
    value = f"{_metavar(known)} ..." if known.many else f"[{_metavar(known)}]" if known.alone else _metavar(known)
    return f"{flags} {value}"


def _metavar(known: Option) -> str:
    if known.known_choices:
        return "{" + ",".join(known.known_choices) + "}"
    return known.metavar or {int: "N", float: "X", str: "WORD"}[known.kind]


def _right(known: Option, *, value: bool, aliases: bool) -> str:
    """The first sentence of an option and its default; with `aliases` all sentences and its other flags.

    value: whether to show the default of a switch too.
    """
    text = known.sentence if aliases else re.split(r"(?<=[^.]\.) (?=[A-Z])", known.sentence, maxsplit=1)[0]
    if (value or known.kind is not bool) and (aliases or known.shown_default != "none"):
        default = f"(default: {known.shown_default})"
        text += " " + (default.replace(" ", _KEPT) if len(default) < 32 else default)
    if aliases:
        names = [alias for alias in known.aliases if alias.startswith("--")]
        names += [flag for flag, (name, _) in SHORT_FORMS.items() if name == known.name]
        text += f" Also: {', '.join(names)}." if names else ""
    return text


def _examples(program: Invocation, width: int) -> list[str]:
    lines = ["examples:"]
    for words, ranks, flags in EXAMPLES:
        start = program.one if ranks == 1 else program.many.format(ranks=ranks)
        lines += [f"  # {words}", *_command(f"{start} {flags}", width)]
    return lines


def _presets(width: int) -> list[str]:
    families: dict[str, list[str]] = {}
    for preset in presets():
        families.setdefault(preset.split("-")[0], []).append(preset)
    lines = (_filled(" ".join(names), width - 2) for names in families.values())
    return ["presets:", *(f"  {line}" for of_family in lines for line in of_family)]


def _unlisted() -> str:
    return (
        f"{len(run_options()) - len(listed_options())} settings that few runs need are not listed. They are keys of a "
        "--config file, as --print-config shows, and flags as well: docs/reference/flags.md, Settings for a file."
    )


def _command(text: str, width: int) -> list[str]:
    """A command that can be pasted. A long one is broken before flags, with a backslash."""
    lines = [""]
    for part in re.split(r" (?=--)", text):
        if len(lines[-1]) + len(part) > width - 6:
            lines.append("")
        lines[-1] += f" {part}" if lines[-1] else part
    return [*(f"  {line}" for line in " \\\n    ".join(lines).split("\n"))]


def _filled(text: str, width: int) -> list[str]:
    """The wrapped lines of a text. Flags are not broken."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace(_KEPT, " ") for line in lines]


@dataclass(frozen=True)
class Goal:
    """The listed flags for one goal.

    heading   the goal, in the words of a person
    fields    fields of a run, in the order of the help
    sections  sections of a run whose other listed fields serve this goal, too: a new field needs no line here
    """

    heading: str
    fields: tuple[str, ...]
    sections: tuple[str, ...] = ()

    def all_fields(self, section_of: Mapping[str, str]) -> list[str]:
        """The fields in the order of the help. section_of: the section of every listed field."""
        of_others = {name for goal in GOALS for name in goal.fields}
        left = {name: section for name, section in section_of.items() if name not in of_others}
        return [*self.fields, *(name for name, section in left.items() if section in self.sections)]


GOALS = (
    Goal(
        "the model",
        (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length"),
            *("vocab_size", "make_vocab_size_divisible_by", "position_embedding", "max_position_embeddings", "norm"),
            *("activation", "embedding_layernorm", "untie_embeddings_and_output_weights", "disable_bias_linear"),
            *("hidden_dropout", "attention_dropout", "init_method_std"),
        ),
        ("model",),
    ),
    Goal(
        "the data",
        (
            *("data_path", "split", "valid_data_path", "tokenizer", "tokenizer_path", "eod_id", "data_cache_path"),
            *("num_workers", "seed"),
        ),
        ("data",),
    ),
    Goal(
        "how long it trains, and in what batches",
        (
            *("train_length", "micro_batch_size", "global_batch_size", "rampup_batch_size"),
            *("exit_interval", "exit_duration_in_mins"),
        ),
    ),
    Goal(
        "how fast it learns (lengths are all in iterations or all in samples)",
        (
            *("lr", "min_lr", "lr_decay_style", "lr_warmup", "lr_decay"),
            *("optimizer", "weight_decay", "adam_beta1", "adam_beta2"),
            *("adam_eps", "clip_grad", "label_smoothing", "z_loss"),
        ),
        ("schedule", "optimizer"),
    ),
    Goal(
        "the precision",
        ("precision", "fp8", "initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"),
    ),
    Goal(
        "how ranks share the work (data parallelism, dp, is ranks / (tp x pp))",
        (
            *("tp", "pp", "zero_stage", "zero_shard_size", "sequence_parallel", "pipeline_schedule", "virtual_stages"),
            *("micro_batch_order", "device", "backend", "cuda_graphs", "distributed_timeout_minutes"),
        ),
        ("parallel",),
    ),
    Goal(
        "less memory",
        (
            *("recompute_granularity", "recompute_num_layers", "activation_memory_budget", "device_memory_budget"),
            "host_memory_budget",
        ),
    ),
    Goal(
        "state off the device",
        (
            *("offload_optimizer", "offload_params", "offload_gradients", "offload_activations", "late_update"),
            *(row.folders for row in FILE_TIERS.values()),
            *("nvme_checkpoint", "placement"),
        ),
        ("offload",),
    ),
    Goal(
        "save and resume",
        (
            *("save", "load", "save_interval", "keep_last", "async_save", "no_load_optim"),
            "override_opt_param_scheduler",
        ),
        ("checkpoint",),
    ),
    Goal(
        "fine-tune",
        (
            *("init_from", "finetune", "instruction_data", "valid_instruction_data", "lora_rank", "lora_alpha"),
            "lora_base_bits",
        ),
        ("lora",),
    ),
    Goal(
        "watch and log",
        ("eval_interval", "eval_iters", "log_interval", "metrics_file", "tensorboard_dir", "sinks"),
        ("trainer",),
    ),
)
