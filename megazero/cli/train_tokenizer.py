"""`megazero train-tokenizer`: a byte-level BPE of the user's own text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_word
from megazero.cli.shared_flags import add_selection_flags, add_text_flags, reader_of
from megazero.data.indexed import DataError
from megazero.data.progress import to_stderr

DESCRIPTION = """
Train a byte-level BPE on text; writes vocab.json and merges.txt, with --chat tokenizer.json.

Then: --tokenizer gpt2 --tokenizer-path TOKENIZER, with --chat: --tokenizer hf --tokenizer-path TOKENIZER
"""
EXAMPLES = (
    "megazero train-tokenizer --input corpus/ --vocab-size 32000 --output TOKENIZER",
    "python tools/train_tokenizer.py --input corpus/ --include '*.txt' --vocab-size 32000 --chat --output TOKENIZER",
)


def parser() -> argparse.ArgumentParser:
    flags = command_parser("train-tokenizer", DESCRIPTION, EXAMPLES)
    add_text_flags(flags, required=True, replaced=" and prints their number")
    add_selection_flags(flags)
    add = flags.add_argument
    add("--vocab-size", type=int, default=32000, help="tokens, 256 bytes and the separator included")
    chat = "with tokens around the turns of a chat, and a chat template: for models that talk"
    add("--chat", action="store_true", help=chat)
    add("--output", type=given_word, required=True, help="folder for the files")
    add("--overwrite", action="store_true", help="replace an existing tokenizer of the same kind")
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return status_of(lambda: run(args), (DataError,))


def run(args: argparse.Namespace) -> None:
    """Train the tokenizer and write its files. Raises DataError."""
    from megazero.data.preprocess import texts
    from megazero.data.train_bpe import require_no_tokenizer, train_bpe

    require_no_tokenizer(args.output, chat=args.chat, overwrite=args.overwrite)
    corpus = texts(args.input, reader_of(args), to_stderr, "reading")
    first = next(corpus)  # what is wrong with the input is known before a folder is made
    train_bpe(chain([first], corpus), args.vocab_size, Path(args.output), to_stderr, chat=args.chat)
    to_stderr(f"the tokenizer is in {args.output}")
