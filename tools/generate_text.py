"""Text from a trained model, alone or under torchrun.

    python tools/generate_text.py --load runs/mine --prompt "Once upon a time" --temperature 0.8 --top-p 0.95
    torchrun --nproc-per-node 4 tools/generate_text.py --load bloom-7b1 --tp 2 --pp 2 --prompt-file prompts.txt --greedy
    python tools/generate_text.py --load runs/chat --chat --interactive
    echo "3 1 4 1 5" | python tools/generate_text.py --load runs/ids --ids --max-new-tokens 20

The checkpoint is of any format that tools/convert_checkpoint.py reads, on any layout. Prompts come from --prompt, from
the lines of --prompt-file (of .jsonl: strings, or "prompt" of each line; - is the standard input), else from the
standard input. A single continuation is shown as it comes, several one after the other, each under its number; --json
prints a line of JSON for each, with prompt, text, ids, and what ended it. The text goes to the standard output, where a
terminal gets control characters as escapes (\\x1b), but for line feed and tab; all else goes to the standard error.
Draws depend on the seed and on a prompt's place among the prompts: the same seed gives the same text on every layout,
whatever the other prompts say, but for rounding.

With --chat a prompt is a user's turn, written by the chat template beside the model's tokenizer, and what comes is the
answer, up to the token that ends it. --chat --interactive is a conversation, which remembers its turns; /help lists its
commands (/reset, /system TEXT, /temperature T). Ctrl-C stops an answer and not the program. A special token that a
prompt spells is plain text, with --chat and without, and a warning says so.

Status: 0, 2 for a mistake in arguments or files, 130 on Ctrl-C, 141 where nobody reads the output any more, 1 for
anything else.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.cli.checkpoint_flags import add_checkpoint_flags, checkpoint_of, checkpoint_problems
from megazero.cli.model_flags import (
    add_layout_flags,
    add_tokenizer_flags,
    not_positive,
    parallel_of,
    problems,
    tokenizer_named,
)
from megazero.config.level import ConfigError
from megazero.convert.loading import Opened, open_model
from megazero.convert.source import ConversionError
from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.tokenizer import Tokenizer
from megazero.data.tool import reader_left
from megazero.inference.advice import KEYS, advised, followed, sampling_of
from megazero.inference.chat_tokens import ChatTokens
from megazero.inference.conversation import Conversation, asked, converse, of_user
from megazero.inference.pipeline import Pipeline
from megazero.inference.prompts import STANDARD_INPUT, read_prompts
from megazero.inference.sampling import Sampling
from megazero.inference.share import shared
from megazero.inference.talk import Manner, Prompt, Talk
from megazero.inference.text import IdTokenizer
from megazero.launch import Environment, exit_status, launch, leave
from megazero.mpu.grid import ProcessGrid

MOST_TOKENS = 128
"""Of a continuation, where nobody says how long it may be."""
A_WEEK = 7 * 24 * 60.0
"""Minutes that the other ranks wait for somebody to type."""


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_checkpoint_flags(flags)
    text = flags.add_argument_group("prompts")
    text.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    text.add_argument(
        "--prompt-file", metavar="FILE", help="a prompt in each line, as text or jsonl; - is the standard input"
    )
    text.add_argument(
        "--interactive", action="store_true", help="ask for one prompt after the other, until the end of the input"
    )
    text.add_argument(
        "--chat",
        action="store_true",
        help="prompts are turns of a user, which the model's chat template writes; the model answers",
    )
    text.add_argument("--system", metavar="TEXT", help="what a system's turn in front of a chat says")
    text.add_argument(
        "--ids", action="store_true", help="prompts and continuations are token ids; no tokenizer is used"
    )
    add_tokenizer_flags(text)
    text.add_argument(
        "--prefix-id", type=int, metavar="ID", help="token in front of every prompt, as some models want one"
    )
    how = flags.add_argument_group(
        "sampling", "What is not given is as the model's generation_config.json says, else as in brackets."
    )
    how.add_argument("--max-new-tokens", type=int, metavar="N", help=f"of each continuation ({MOST_TOKENS})")
    how.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="continuations of each prompt (%(default)s)"
    )
    how.add_argument("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    how.add_argument("--temperature", type=float, metavar="T", help="logits are divided by it (1.0)")
    how.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; 0: from all (0)")
    how.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that add up to P (1.0)")
    how.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="makes tokens that were there less likely (1.0)"
    )
    how.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends a continuation, and is not shown; may be repeated",
    )
    how.add_argument(
        "--stop-id",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="token that ends a continuation; may be repeated",
    )
    how.add_argument(
        "--ignore-eod",
        action="store_true",
        help="go on behind the token that ends a document, and others at which the model's files or the chat template "
        "end a text",
    )
    how.add_argument("--seed", type=int, default=Sampling.seed, help="of the draws (%(default)s)")
    how.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="continuations that are computed at once (%(default)s)"
    )
    add_layout_flags(flags)
    flags.add_argument("--json", action="store_true", help="a line of JSON for each continuation")
    return flags


def given(args: argparse.Namespace) -> dict[str, float]:
    """What the flags say of how tokens are taken, and how many at most."""
    flags = {key: getattr(args, key) for key in KEYS if getattr(args, key) is not None}
    return flags | ({"temperature": 0.0} if args.greedy else {})


def check(args: argparse.Namespace, world_size: int) -> None:
    """Raises ConfigError, which names all that is wrong."""
    wrong = [*checkpoint_problems(args), *problems(args, world_size, replicas=False)]
    wrong += not_positive(args, "max_new_tokens", "num_samples", "batch_size")
    if args.greedy and args.temperature:
        wrong.append(f"--greedy and --temperature {args.temperature} exclude each other")
    try:
        sampling_of(given(args), args.seed)
    except ValueError as error:
        wrong.append(str(error))
    if args.ids and args.tokenizer:
        wrong.append(f"--ids and --tokenizer {args.tokenizer} exclude each other")
    if args.system is not None and not args.chat:
        wrong.append("--system: it is a turn of a --chat")
    if args.chat and args.ids:
        wrong.append("--chat and --ids exclude each other: a chat is text")
    if args.chat and args.prefix_id is not None:
        wrong.append(
            f"--chat and --prefix-id {args.prefix_id} exclude each other: the chat template writes what begins a chat"
        )
    if "" in args.stop:
        wrong.append("--stop: a stop string is empty")
    if args.interactive and (args.prompt or args.prompt_file):
        wrong.append("--interactive asks for prompts: --prompt and --prompt-file exclude it")
    elif not (args.interactive or args.prompt or args.prompt_file) and sys.stdin.isatty():
        wrong.append("there is nothing to continue: --prompt TEXT, --prompt-file FILE or --interactive")
    if args.prompt_file not in (None, STANDARD_INPUT) and not Path(args.prompt_file).expanduser().exists():
        wrong.append(f"--prompt-file {args.prompt_file}: there is no such file")
    if wrong:
        raise ConfigError(wrong)


def note(grid: ProcessGrid, text: str) -> None:
    if grid.rank == 0:
        print(text, file=sys.stderr, flush=True)


def tokenizer_for(args: argparse.Namespace, opened: Opened) -> Tokenizer:
    """Raises DataError."""
    assert opened.run.model.vocab_size is not None
    if args.ids:
        return IdTokenizer(opened.run.model.vocab_size)
    found = tokenizer_named(args, opened)
    if found is None:
        raise DataError(
            f"{checkpoint_of(args)} leads to no tokenizer; name one by --tokenizer and --tokenizer-path, or work on "
            "--ids"
        )
    if not args.chat:
        return found
    try:
        return ChatTokens(found)
    except (DataError, ImportError) as error:
        raise DataError(f"--chat: {error}") from error


def manner_of(args: argparse.Namespace, opened: Opened, tokenizer: Tokenizer) -> Manner:
    """Raises DataError for ids that the model has not."""
    vocabulary = opened.run.model.vocab_size or 0
    for flag, ids in (("--stop-id", args.stop_id), ("--prefix-id", [] if args.prefix_id is None else [args.prefix_id])):
        for wrong in ids:
            if not 0 <= wrong < vocabulary:
                raise DataError(f"{flag} {wrong}: the model's vocabulary has {vocabulary} tokens")
    eod = opened.end_of_document(tokenizer)
    ends = opened.ends.union(() if eod is None else (eod,), tokenizer.ends if isinstance(tokenizer, ChatTokens) else ())
    settings = followed(advised(opened.generation), given(args)) | given(args)
    return Manner(
        sampling_of(settings, args.seed),
        int(settings.get("max_new_tokens", MOST_TOKENS)),
        samples=args.num_samples,
        batch_size=args.batch_size,
        stops=args.stop,
        stop_ids=frozenset(args.stop_id) if args.ignore_eod else ends.union(args.stop_id),
        prefix_id=args.prefix_id,
        eod_id=eod,
        as_json=args.json,
    )


def talk_on(args: argparse.Namespace, grid: ProcessGrid) -> None:
    """On every rank."""
    began = time.perf_counter()
    opened = open_model(checkpoint_of(args), grid, precision=args.precision, format=args.format)
    tokenizer = tokenizer_for(args, opened)
    pipeline = Pipeline.of(opened.stages, grid, opened.chunk_map)
    manner = manner_of(args, opened, tokenizer)
    talk = Talk(opened.run.model, pipeline, tokenizer, manner, grid.rank == 0, partial(note, grid))
    if isinstance(tokenizer, HuggingFaceTokenizer) and len(tokenizer.begins) == 1 and args.prefix_id is None:
        begins = tokenizer.begins[0]
        talk.note(
            f"transformers puts {begins} before every prompt for this tokenizer, and here nothing is put: --prefix-id "
            f"{begins} does"
        )
    talk.note(
        f"{checkpoint_of(args)} read in {time.perf_counter() - began:.1f} s, {opened.run.optimizer.precision} on "
        f"{grid.device}"
    )
    if advice := followed(advised(opened.generation), given(args)):
        words = " ".join(f"--{key.replace('_', '-')} {value:g}" for key, value in advice.items())
        talk.note(f"as the model's generation_config.json says, since no flag says otherwise: {words}")
    if args.interactive:
        converse(talk, grid, Conversation(talk, args.system) if args.chat else None)
        return
    file = args.prompt_file or (None if args.prompt else STANDARD_INPUT)

    def read() -> list[Prompt]:
        given = read_prompts(args.prompt, file)
        return (
            talk.read_chats([asked(args.system, of_user(prompt)) for prompt in given])
            if args.chat
            else talk.read(given)
        )

    prompts = shared(grid, read)
    if not prompts:
        raise DataError(f"--prompt-file {file}: there are no prompts in it")
    talk.answer(prompts)


def main() -> None:
    environment = Environment.read()
    args = parser().parse_args()

    def run() -> None:
        check(args, environment.world_size)
        parallel = parallel_of(args)
        if args.interactive:
            parallel = replace(parallel, distributed_timeout_minutes=A_WEEK)
        try:
            with launch(parallel, environment) as grid:
                talk_on(args, grid)
        except (ConversionError, DataError, FloatingPointError) as error:
            raise ConfigError([str(error)]) from error
        except BrokenPipeError:
            raise SystemExit(reader_left()) from None

    try:
        status = exit_status(run, environment)
    except SystemExit as leaving:
        status = int(str(leaving.code))
    except KeyboardInterrupt:
        status = 130
    leave(status)


if __name__ == "__main__":
    main()
