"""What `megazero generate` does."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from megazero.cli.checkpoint_flags import checkpoint_of, checkpoint_problems
from megazero.cli.exit_status import end_rank
from megazero.cli.model_flags import MOST_TOKENS, not_positive, parallel_of, problems, tokenizer_named, ways_to_name_one
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.convert.hf.config import ids_of
from megazero.convert.loading import LoadedModel, open_model
from megazero.convert.source import ConversionError
from megazero.convert.tokenizers import no_tokenizer
from megazero.data.indexed import DataError
from megazero.data.tokenizer import Tokenizer
from megazero.data.tokenizer_differences import begins_of, told_of_differences
from megazero.inference.broadcast_json import read_on_first_rank
from megazero.inference.chat_tokens import ChatTokens
from megazero.inference.conversation import Conversation, converse, start_messages, user_message
from megazero.inference.generation_config import (
    KEYS,
    MAX_LENGTH,
    applicable_defaults,
    generation_defaults,
    not_applied,
    sampling_of,
)
from megazero.inference.pipeline import Pipeline
from megazero.inference.prompts import STANDARD_INPUT, read_prompts
from megazero.inference.text import IdTokenizer
from megazero.inference.text_generator import GenerationOptions, Prompt, TextGenerator
from megazero.launch import Environment, launch
from megazero.mpu.grid import ProcessGrid

NO_PROMPT = "there is no prompt in the standard input: give one by --prompt TEXT, or ask for them by --interactive"
A_WEEK = 7 * 24 * 60.0
"""The timeout in minutes while the other ranks wait for the user to type."""


def sampling_flags(args: argparse.Namespace) -> dict[str, float]:
    """The settings of `KEYS` that the flags give."""
    flags = {key: getattr(args, key) for key in KEYS if getattr(args, key) is not None}
    return flags | ({"temperature": 0.0} if args.greedy else {})


def check(args: argparse.Namespace, world_size: int) -> None:
    """Raise one ConfigError with all problems of the flags."""
    wrong = [*checkpoint_problems(args), *problems(args, world_size, replicas=False)]
    wrong += not_positive(args, "max_new_tokens", "num_samples", "batch_size")
    if args.greedy and args.temperature:
        wrong.append(f"--greedy and --temperature {args.temperature} exclude each other")
    try:
        sampling_of(sampling_flags(args), args.seed)
    except ValueError as error:
        for problem in str(error).split("; "):
            name, _, fault = problem.partition(" ")
            wrong.append(f"--{name.replace('_', '-')} {fault}")
    if args.ids and args.tokenizer:
        wrong.append(f"--ids and --tokenizer {args.tokenizer} exclude each other")
    if args.system is not None and not args.chat:
        wrong.append("--system: it is a turn of a --chat")
    if args.chat and args.ids:
        wrong.append("--chat and --ids exclude each other: a chat is text")
    if args.chat and (args.prefix_id is not None or args.no_prefix):
        flag = "--no-prefix" if args.no_prefix else f"--prefix-id {args.prefix_id}"
        wrong.append(f"--chat and {flag} exclude each other: the chat template writes what begins a chat")
    if args.no_prefix and args.prefix_id is not None:
        wrong.append(f"--no-prefix and --prefix-id {args.prefix_id} exclude each other")
    if "" in args.stop:
        wrong.append("--stop: a stop string is empty")
    if args.interactive and (args.prompt or args.prompt_file):
        wrong.append("--interactive asks for prompts: --prompt and --prompt-file exclude it")
    elif not (args.interactive or args.prompt or args.prompt_file) and sys.stdin.isatty():
        wrong.append("there is nothing to continue: --prompt TEXT, --prompt-file FILE or --interactive")
    if args.prompt_file not in (None, STANDARD_INPUT):
        prompts = Path(args.prompt_file).expanduser()
        if not args.prompt_file or os.path.isdir(prompts):
            what = "is a folder" if args.prompt_file else "is empty"
            wrong.append(f"--prompt-file {args.prompt_file}: {what}; name a file")
        elif not os.path.exists(prompts):
            wrong.append(f"--prompt-file {args.prompt_file}: there is no such file")
    if wrong:
        raise ConfigError(wrong)


def note(grid: ProcessGrid, text: str) -> None:
    if grid.rank == 0:
        print(text, file=sys.stderr, flush=True)


def tokenizer_for(args: argparse.Namespace, loaded: LoadedModel) -> Tokenizer:
    """The tokenizer by the flags, or the checkpoint's own. Raises DataError if there is none, or none for --chat."""
    assert loaded.run.model.vocab_size is not None
    if args.ids:
        return IdTokenizer(loaded.run.model.vocab_size)
    found = tokenizer_named(args, loaded)
    if found is None:
        raise DataError(
            f"{checkpoint_of(args)} {no_tokenizer(loaded.report)}; name one by {ways_to_name_one(loaded)}, or "
            "work on --ids"
        )
    if not args.chat:
        return found
    try:
        return ChatTokens(found)
    except (DataError, ImportError) as error:
        raise DataError(f"--chat: {error}") from error


def prefix_of(args: argparse.Namespace, loaded: LoadedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids before every prompt: those of the flags, else what `transformers` puts there, but for a checkpoint of a
    training, whose documents had none.
    """
    if args.no_prefix:
        return ()
    if args.prefix_id is not None:
        return (args.prefix_id,)
    return () if loaded.trained else begins_of(tokenizer)


def told_of_tokenizer(args: argparse.Namespace, loaded: LoadedModel, tokenizer: Tokenizer) -> Iterator[str]:
    """What the model's tokenizer does that the user may not expect."""
    begins = () if args.chat or args.no_prefix or args.prefix_id is not None else begins_of(tokenizer)
    words = " ".join(map(str, begins))
    if begins and loaded.trained:
        one = f": --prefix-id {words} does" * (len(begins) == 1)
        yield (
            f"transformers puts {words} before every prompt for this tokenizer, and here nothing is put, because the "
            f"documents of the training had none{one}"
        )
    elif begins:
        yield f"{words} is put before every prompt, as transformers does for this tokenizer; --no-prefix puts nothing"
    yield from told_of_differences(tokenizer)


def lines_read(file: str | None, count: int) -> str | None:
    """A remark on prompts of a file that were meant as one; None for fewer than two."""
    if file is None or count < 2:
        return None
    several = "" if file.endswith(".jsonl") else "; a prompt of several lines is a line of a .jsonl file"
    return f"{'the standard input' if file == STANDARD_INPUT else file}: {count} prompts, one a line{several}"


def options_of(args: argparse.Namespace, loaded: LoadedModel, tokenizer: Tokenizer) -> GenerationOptions:
    """The options by the flags and the model's own defaults. Raises DataError for ids outside the vocabulary."""
    vocabulary = loaded.run.model.vocab_size or 0
    for flag, ids in (("--stop-id", args.stop_id), ("--prefix-id", [] if args.prefix_id is None else [args.prefix_id])):
        for wrong in ids:
            if not 0 <= wrong < vocabulary:
                raise DataError(f"{flag} {wrong}: the model's vocabulary has {vocabulary} tokens")
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
    file, said = loaded.generation
    return applicable_defaults(generation_defaults(said, file), sampling_flags(args))


def told_of_advice(args: argparse.Namespace, loaded: LoadedModel) -> Iterator[str]:
    """What is taken from the model's generation_config.json or config.json, and what is not."""
    file, said = loaded.generation
    if advice := advised(args, loaded):
        words = " ".join(
            f"{key} {value:g}" if key == MAX_LENGTH else f"--{key.replace('_', '-')} {value:g}"
            for key, value in advice.items()
        )
        yield f"as the model's {file} says, since no flag says otherwise: {words}"
    if ignored := not_applied(said):
        yield f"the model's {file} changes the text in ways that are not applied here: {', '.join(ignored)}"
    vocabulary = loaded.run.model.vocab_size or 0
    if unknown := [token for token in ids_of(said, "eos_token_id") if not 0 <= token < vocabulary]:
        yield (
            f"the model's {file} ends a text at eos_token_id {' '.join(map(str, unknown))}, which never comes: the "
            f"model's vocabulary has {vocabulary} tokens"
        )


def generate_on(args: argparse.Namespace, grid: ProcessGrid) -> None:
    """Open the model and continue the prompts. A collective of all ranks."""
    began = time.perf_counter()
    loaded = open_model(checkpoint_of(args), grid, precision=args.precision, format=args.format)
    tokenizer = tokenizer_for(args, loaded)
    pipeline = Pipeline.of(loaded.stages, grid, loaded.chunk_map)
    options = options_of(args, loaded, tokenizer)
    generator = TextGenerator(loaded.run.model, pipeline, tokenizer, options, grid.rank == 0, partial(note, grid))
    for line in told_of_tokenizer(args, loaded, loaded.tokenizer if args.chat and loaded.tokenizer else tokenizer):
        generator.note(line)
    generator.note(
        f"{checkpoint_of(args)} read in {time.perf_counter() - began:.1f} s, {loaded.run.optimizer.precision} on "
        f"{grid.device}"
    )
    for line in told_of_advice(args, loaded):
        generator.note(line)
    if args.interactive:
        converse(generator, grid, Conversation(generator, args.system) if args.chat else None)
        return
    file = args.prompt_file or (None if args.prompt else STANDARD_INPUT)

    def read() -> list[Prompt]:
        given = read_prompts(args.prompt, file)
        if (remark := lines_read(file, len(given) - len(args.prompt))) is not None:
            generator.note(remark)
        return (
            generator.read_chats([start_messages(args.system, user_message(prompt)) for prompt in given])
            if args.chat
            else generator.read(given)
        )

    prompts = read_on_first_rank(grid, read)
    if not prompts:
        typed = f"--prompt-file {file}: there are no prompts in it"
        raise DataError(typed if args.prompt_file else NO_PROMPT)
    generator.answer(prompts)


def run(args: argparse.Namespace) -> NoReturn:
    """Generate as this rank, and end its process."""

    def work(here: Environment) -> None:
        check(args, here.world_size)
        parallel = parallel_of(args)
        if args.interactive:
            parallel = replace(parallel, distributed_timeout_minutes=A_WEEK)
        with launch(Run(parallel=parallel), here) as grid:
            generate_on(args, grid)

    end_rank(work, (ConversionError, DataError, FloatingPointError))
