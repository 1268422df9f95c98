"""`megazero train-tokenizer`: training a byte-level BPE tokenizer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from megazero.cli.data_flags import add_reader_flags, reader_of
from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_word
from megazero.data.indexed import DataError
from megazero.data.preprocess import texts
from megazero.data.progress import to_stderr
from megazero.data.train_bpe import require_no_tokenizer, train_bpe

DESCRIPTION = """
Train a byte-level BPE on text; writes vocab.json and merges.txt, with --chat tokenizer.json.

Then: --tokenizer gpt2 --tokenizer-path TOKENIZER, with --chat: --tokenizer hf --tokenizer-path TOKENIZER
"""
EXAMPLES = (
    "megazero train-tokenizer --input corpus/ --vocab-size 32000 --output TOKENIZER",
    "python tools/train_tokenizer.py --input corpus/ --include '*.txt' --vocab-size 32000 --chat --output TOKENIZER",
)


def parser() -> argparse.ArgumentParser:
    made = command_parser("train-tokenizer", DESCRIPTION, EXAMPLES)
    add_reader_flags(made)
    made.add_argument("--vocab-size", type=int, default=32000, help="tokens, 256 bytes and the separator included")
    made.add_argument(
        "--chat",
        action="store_true",
        help="with tokens around the turns of a chat, and a chat template: for models that talk",
    )
    made.add_argument("--output", type=given_word, required=True, help="folder for the files")
    made.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer of the same kind")
    return made


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return status_of(lambda: train(args), (DataError,))


def train(args: argparse.Namespace) -> None:
    require_no_tokenizer(args.output, chat=args.chat, overwrite=args.overwrite)
    read = texts(args.input, reader_of(args), to_stderr, "reading")
    first = next(read)  # what is wrong with the input is known before a folder is made
    train_bpe(chain([first], read), args.vocab_size, Path(args.output), to_stderr, chat=args.chat)
    to_stderr(f"the tokenizer is in {args.output}")
