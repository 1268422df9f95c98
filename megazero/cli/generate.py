"""`megazero generate`: its flags; `generation` does what they say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.checkpoint_flags import add_checkpoint_flags
from megazero.cli.model_flags import MOST_TOKENS, add_layout_flags, add_tokenizer_flags
from megazero.cli.parser import command_parser
from megazero.config.schema import DataConfig

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


def parser() -> argparse.ArgumentParser:
    flags = command_parser("generate", DESCRIPTION, EXAMPLES)
    add_checkpoint_flags(flags)
    _add_prompts(flags)
    _add_sampling(flags)
    add_layout_flags(flags)
    flags.add_argument("--json", action="store_true", help="a line of JSON for each continuation")
    return flags


def _add_prompts(flags: argparse.ArgumentParser) -> None:
    text = flags.add_argument_group("prompts")
    text.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    text.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="each line is a prompt of its own; a prompt of several lines is a line of .jsonl, with \\n in its string; "
        "- is the standard input",
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
        "--prefix-id",
        type=int,
        metavar="ID",
        help="token in front of every prompt (default: as transformers; a checkpoint of a training gets none)",
    )
    text.add_argument("--no-prefix", action="store_true", help="nothing in front of prompts")


def _add_sampling(flags: argparse.ArgumentParser) -> None:
    how = flags.add_argument_group(
        "sampling", "Defaults are those of the model's generation_config.json, else those in brackets."
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
    how.add_argument("--seed", type=int, default=DataConfig.seed, help="of the draws (%(default)s)")
    how.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="continuations that are computed at once (%(default)s)"
    )


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from megazero.cli.generation import run

    run(args)
