"""`megazero generate`: text from a trained model."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.cli.parser import command_parser, flag_of, not_positive
from megazero.cli.shared_flags import (
    add_checkpoint_flags,
    add_layout_flags,
    add_tokenizer_flags,
    checkpoint_of,
    model_problems,
    no_tokenizer_message,
    run_on_grid,
    tokenizer_named,
)
from megazero.config.schema import DataConfig
from megazero.config.source import ConfigError
from megazero.data.indexed import DataError
from megazero.inference.prompts import STANDARD_INPUT, read_prompts

if TYPE_CHECKING:
    from megazero.convert.loading import LoadedModel
    from megazero.data.tokenizer import Tokenizer
    from megazero.inference.text_generator import GenerationOptions, Prompt
    from megazero.mpu.grid import ProcessGrid

DESCRIPTION = """
Text from a trained model, alone or under torchrun.

The checkpoint may have any format that `megazero convert` reads, and any layout. Prompts come from --prompt and from
the lines of --prompt-file. Each line of text is a prompt. A line of .jsonl is a string or an object with "prompt", and
its text may have several lines. Without both, prompts are the lines of the standard input. A single continuation is
printed token by token, several one after the other, each under its number. --json prints a line of JSON for each, with
prompt, text, ids, and what ended it. The text goes to the standard output; a terminal gets control characters as
escapes (\\x1b), except line feed and tab. Everything else goes to the standard error. Draws depend on the seed and on
the number of a prompt: except for rounding, the same seed gives the same text on every layout, whatever the other
prompts are.

With --chat a prompt is a user's turn, encoded by the chat template of the model's tokenizer, and the text is the answer
up to the token that ends it. --chat --interactive is a conversation, which remembers its turns; /help lists its
commands (/reset, /system TEXT, /temperature T). Ctrl-C stops an answer, but not the program. A special token that a
prompt spells is plain text, with or without --chat, and a warning says so.

Status: 0, 2 for a mistake in arguments or files, 130 on Ctrl-C, 141 where nobody reads the output any more, 1 for
anything else.
"""
EXAMPLES = (
    'megazero generate runs/mine --prompt "Once upon a time" --temperature 0.8 --top-p 0.95',
    "megazero generate runs/chat --chat --interactive",
    "torchrun --nproc-per-node 4 -m megazero generate bloom-7b1 --tp 2 --pp 2 --prompt-file prompts.txt --greedy",
    'echo "3 1 4 1 5" | python tools/generate_text.py --load runs/ids --ids --max-new-tokens 20',
)
MOST_TOKENS = 128
"""The most tokens of a continuation, if neither flags nor the model's files set a limit."""
NO_PROMPT = "there is no prompt in the standard input: give one by --prompt TEXT, or ask for them by --interactive"
A_WEEK_OF_MINUTES = 7 * 24 * 60.0
"""The timeout in minutes while the other ranks wait for the user to type."""


def parser() -> argparse.ArgumentParser:
    flags = command_parser("generate", DESCRIPTION, EXAMPLES)
    add_checkpoint_flags(flags)
    prompts = flags.add_argument_group("prompts")
    add = prompts.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    lines = "each line is a prompt of its own; a prompt of several lines is a line of .jsonl, with \\n in its string"
    add("--prompt-file", metavar="FILE", help=f"{lines}; - is the standard input")
    add("--interactive", action="store_true", help="ask for one prompt after the other, until the end of the input")
    chat = "prompts are turns of a user, which the model's chat template writes; the model answers"
    add("--chat", action="store_true", help=chat)
    add("--system", metavar="TEXT", help="what a system's turn in front of a chat says")
    add("--ids", action="store_true", help="prompts and continuations are token ids; no tokenizer is used")
    add_tokenizer_flags(prompts, default=" (default: the checkpoint's own)")
    prefix = "token in front of every prompt (default: as transformers; a checkpoint of a training gets none)"
    add("--prefix-id", type=int, metavar="ID", help=prefix)
    add("--no-prefix", action="store_true", help="nothing in front of prompts")
    defaults = "Defaults are those of the model's generation_config.json, else those in brackets."
    add = flags.add_argument_group("sampling", defaults).add_argument
    add("--max-new-tokens", type=int, metavar="N", help=f"of each continuation ({MOST_TOKENS})")
    add("--num-samples", type=int, default=1, metavar="N", help="continuations of each prompt (%(default)s)")
    add("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    add("--temperature", type=float, metavar="T", help="logits are divided by it (1.0)")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; 0: from all (0)")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that add up to P (1.0)")
    add("--repetition-penalty", type=float, metavar="R", help="makes tokens that were there less likely (1.0)")
    stop = "ends a continuation, and is not shown; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    stop_id = "token that ends a continuation; may be repeated"
    add("--stop-id", action="append", type=int, default=[], metavar="ID", help=stop_id)
    others = "and others at which the model's files or the chat template end a text"
    add("--ignore-eod", action="store_true", help=f"go on behind the token that ends a document, {others}")
    add("--seed", type=int, default=DataConfig.seed, help="of the draws (%(default)s)")
    add("--batch-size", type=int, default=16, metavar="N", help="continuations that are computed at once (%(default)s)")
    add_layout_flags(flags)
    flags.add_argument("--json", action="store_true", help="a line of JSON for each continuation")
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    if args.interactive:
        args.distributed_timeout_minutes = A_WEEK_OF_MINUTES
    run_on_grid(args, check, generate_on, (FloatingPointError,))


def check(args: argparse.Namespace, world_size: int) -> None:
    """Raise one ConfigError with all problems of the flags."""
    problems = [*model_problems(args, world_size, replicas=False)]
    problems += not_positive(args, "max_new_tokens", "num_samples", "batch_size")
    problems += [*sampling_problems(args), *exclusive_flags(args), *prompt_problems(args)]
    if problems:
        raise ConfigError(problems)


def sampling_flags(args: argparse.Namespace) -> dict[str, float]:
    """The settings of `KEYS` that the flags give."""
    from megazero.inference.generation_config import KEYS

    flags = {key: getattr(args, key) for key in KEYS if getattr(args, key) is not None}
    return flags | ({"temperature": 0.0} if args.greedy else {})


def sampling_problems(args: argparse.Namespace) -> Iterator[str]:
    """The problems of the flags that say how tokens are drawn."""
    from megazero.inference.generation_config import sampling_of

    if args.greedy and args.temperature:
        yield f"--greedy and --temperature {args.temperature} exclude each other"
    try:
        sampling_of(sampling_flags(args), args.seed)
    except ValueError as error:  # its message begins each problem with a setting: top_p (2.0) is ...; top_k (-1) is ...
        for problem in str(error).split("; "):
            name, _, fault = problem.partition(" ")
            yield f"{flag_of(name)} {fault}"
    if "" in args.stop:
        yield "--stop: a stop string is empty"


def exclusive_flags(args: argparse.Namespace) -> Iterator[str]:
    """Flags that contradict each other, or that need another one."""
    prefix_id = f"--prefix-id {args.prefix_id}" if args.prefix_id is not None else ""
    prefix = "--no-prefix" if args.no_prefix else prefix_id
    problems = {
        f"--ids and --tokenizer {args.tokenizer} exclude each other": args.ids and args.tokenizer,
        "--system: it is a turn of a --chat": args.system is not None and not args.chat,
        "--chat and --ids exclude each other: a chat is text": args.chat and args.ids,
        f"--chat and {prefix} exclude each other: the chat template writes what begins a chat": args.chat and prefix,
        f"--no-prefix and {prefix_id} exclude each other": args.no_prefix and prefix_id,
    }
    return (problem for problem, holds in problems.items() if holds)


def prompt_problems(args: argparse.Namespace) -> Iterator[str]:
    """The problems of the flags that say where prompts are."""
    if args.interactive and (args.prompt or args.prompt_file):
        yield "--interactive asks for prompts: --prompt and --prompt-file exclude it"
    # A terminal as the standard input would be waited for without a word; a pipe or a file has the prompts.
    elif not (args.interactive or args.prompt or args.prompt_file) and sys.stdin.isatty():
        yield "there is nothing to continue: --prompt TEXT, --prompt-file FILE or --interactive"
    if args.prompt_file in (None, STANDARD_INPUT):
        return
    file = Path(args.prompt_file).expanduser()
    if not args.prompt_file:
        yield "--prompt-file : is empty; name a file"
    elif file.is_dir():
        yield f"--prompt-file {args.prompt_file}: is a folder; name a file"
    elif not os.path.exists(file):
        yield f"--prompt-file {args.prompt_file}: there is no such file"


def tokenizer_for(args: argparse.Namespace, loaded: LoadedModel) -> Tokenizer:
    """The tokenizer by the flags, or the checkpoint's own. Raises DataError if there is none, or none for --chat."""
    from megazero.inference.chat_tokens import ChatTokens
    from megazero.inference.text import IdTokenizer

    assert loaded.run.model.vocab_size is not None
    if args.ids:
        return IdTokenizer(loaded.run.model.vocab_size)
    tokenizer = tokenizer_named(args, loaded)
    if tokenizer is None:
        raise DataError(f"{no_tokenizer_message(args, loaded)}, or work on --ids")
    if not args.chat:
        return tokenizer
    try:
        return ChatTokens(tokenizer)
    except (DataError, ImportError) as error:
        raise DataError(f"--chat: {error}") from error


def prefix_of(args: argparse.Namespace, loaded: LoadedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids before every prompt: those of the flags, else what `transformers` puts there, but for a checkpoint of a
    training, whose documents had none.
    """
    from megazero.data.tokenizer_differences import begins_of

    if args.no_prefix:
        return ()
    if args.prefix_id is not None:
        return (args.prefix_id,)
    return () if loaded.trained else begins_of(tokenizer)


def tokenizer_remarks(args: argparse.Namespace, loaded: LoadedModel, tokenizer: Tokenizer) -> Iterator[str]:
    """What the model's tokenizer does that the user may not expect."""
    from megazero.data.tokenizer_differences import begins_of, told_of_differences

    begins = () if args.chat or args.no_prefix or args.prefix_id is not None else begins_of(tokenizer)
    ids = " ".join(map(str, begins))
    if begins and loaded.trained:
        flag = f": --prefix-id {ids} does" * (len(begins) == 1)  # the flag takes one id
        yield (
            f"transformers puts {ids} before every prompt for this tokenizer, and here nothing is put, because the "
            f"documents of the training had none{flag}"
        )
    elif begins:
        yield f"{ids} is put before every prompt, as transformers does for this tokenizer; --no-prefix puts nothing"
    yield from told_of_differences(tokenizer)


def prompt_count(file: str | None, count: int) -> str | None:
    """A remark on prompts of a file that were meant as one; None for fewer than two."""
    if file is None or count < 2:
        return None
    several = "" if file.endswith(".jsonl") else "; a prompt of several lines is a line of a .jsonl file"
    return f"{'the standard input' if file == STANDARD_INPUT else file}: {count} prompts, one a line{several}"


def options_of(args: argparse.Namespace, loaded: LoadedModel, tokenizer: Tokenizer) -> GenerationOptions:
    """The options by the flags and the model's own defaults. Raises DataError for ids outside the vocabulary."""
    from megazero.inference.chat_tokens import ChatTokens
    from megazero.inference.generation_config import MAX_LENGTH, sampling_of
    from megazero.inference.text_generator import GenerationOptions

    vocabulary = loaded.run.model.vocab_size or 0
    for flag, ids in (("--stop-id", args.stop_id), ("--prefix-id", [] if args.prefix_id is None else [args.prefix_id])):
        for token in ids:
            if not 0 <= token < vocabulary:
                raise DataError(f"{flag} {token}: the model's vocabulary has {vocabulary} tokens")
    eod = loaded.end_of_document(tokenizer)
    ends = loaded.ends.union(() if eod is None else (eod,), tokenizer.ends if isinstance(tokenizer, ChatTokens) else ())
    settings = advised(args, loaded) | sampling_flags(args)
    return GenerationOptions(
        sampling_of(settings, args.seed),
        int(settings.get("max_new_tokens", MOST_TOKENS)),
        samples=args.num_samples,
        batch_size=args.batch_size,
        stops=args.stop,
        stop_ids=frozenset(args.stop_id) if args.ignore_eod else ends.union(args.stop_id),
        prefix=prefix_of(args, loaded, tokenizer),
        eod_id=eod,
        as_json=args.json,
        max_length=int(settings[MAX_LENGTH]) if MAX_LENGTH in settings else None,
    )


def advised(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, float]:
    """What the model's files say and no flag does. Raises DataError."""
    from megazero.inference.generation_config import applicable_defaults, generation_defaults

    file, settings = loaded.generation
    return applicable_defaults(generation_defaults(settings, file), sampling_flags(args))


def settings_remarks(args: argparse.Namespace, loaded: LoadedModel) -> Iterator[str]:
    """What is taken from the model's generation_config.json or config.json, and what is not."""
    from megazero.convert.hf.config import ids_of
    from megazero.inference.generation_config import MAX_LENGTH, not_applied

    file, settings = loaded.generation
    if advice := advised(args, loaded):
        # MAX_LENGTH has no flag: it is shown under the file's own name.
        names = {key: key if key == MAX_LENGTH else flag_of(key) for key in advice}
        advised_flags = " ".join(f"{names[key]} {value:g}" for key, value in advice.items())
        yield f"as the model's {file} says, since no flag says otherwise: {advised_flags}"
    if ignored := not_applied(settings):
        yield f"the model's {file} changes the text in ways that are not applied here: {', '.join(ignored)}"
    vocabulary = loaded.run.model.vocab_size or 0
    if unknown := [token for token in ids_of(settings, "eos_token_id") if not 0 <= token < vocabulary]:
        yield (
            f"the model's {file} ends a text at eos_token_id {' '.join(map(str, unknown))}, which never comes: the "
            f"model's vocabulary has {vocabulary} tokens"
        )


def generate_on(args: argparse.Namespace, grid: ProcessGrid) -> None:
    """Open the model and continue the prompts. A collective of all ranks."""
    from megazero.convert.loading import open_model
    from megazero.inference.broadcast_json import read_on_first_rank
    from megazero.inference.conversation import Conversation, converse, start_messages, user_message
    from megazero.inference.pipeline import Pipeline
    from megazero.inference.text_generator import TextGenerator

    def note(text: str) -> None:
        if grid.rank == 0:
            print(text, file=sys.stderr, flush=True)

    began = time.perf_counter()
    loaded = open_model(checkpoint_of(args), grid, precision=args.precision, format=args.format)
    tokenizer = tokenizer_for(args, loaded)
    pipeline = Pipeline.of(loaded.stages, grid, loaded.chunk_map)
    options = options_of(args, loaded, tokenizer)
    generator = TextGenerator(loaded.run.model, pipeline, tokenizer, options, grid.rank == 0, note)
    seconds, precision = time.perf_counter() - began, loaded.run.optimizer.precision
    # The remarks are about the tokenizer inside `ChatTokens`, which itself has no differences to `transformers`.
    described = loaded.tokenizer if args.chat and loaded.tokenizer else tokenizer
    for line in (
        *tokenizer_remarks(args, loaded, described),
        f"{checkpoint_of(args)} read in {seconds:.1f} s, {precision} on {grid.device}",
        *settings_remarks(args, loaded),
    ):
        note(line)
    if args.interactive:
        converse(generator, grid, Conversation(generator, args.system) if args.chat else None)
        return
    file = args.prompt_file or (None if args.prompt else STANDARD_INPUT)

    def read() -> list[Prompt]:
        prompts = read_prompts(args.prompt, file)
        if (remark := prompt_count(file, len(prompts) - len(args.prompt))) is not None:
            note(remark)
        if args.chat:
            return generator.read_chats([start_messages(args.system, user_message(prompt)) for prompt in prompts])
        return generator.read(prompts)

    prompts = read_on_first_rank(grid, read)
    if not prompts:
        empty = f"--prompt-file {file}: there are no prompts in it"
        raise DataError(empty if args.prompt_file else NO_PROMPT)
    generator.answer(prompts)
