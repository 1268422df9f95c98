"""`megazero prepare-data`: text into a .bin/.idx pair for training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_word
from megazero.cli.shared_flags import add_selection_flags, add_text_flags, add_tokenizer_flags, cores, reader_of
from megazero.data.indexed import DataError
from megazero.data.progress import to_stderr
from megazero.system.words import counted

DESCRIPTION = "Turn text (jsonl or plain; .gz, .zst; folders) into PREFIX.bin and PREFIX.idx for training, or neither."
EXAMPLES = (
    "megazero prepare-data --input corpus/ more.jsonl.zst --output-prefix data/mine --tokenizer byte --append-eod",
    "python tools/preprocess_data.py --input corpus/ --output-prefix data/mine --tokenizer gpt2 --tokenizer-path DIR",
)


def parser() -> argparse.ArgumentParser:
    flags = command_parser("prepare-data", DESCRIPTION, EXAMPLES)
    add_text_flags(flags, required=True, replaced=" and prints their number")
    add_selection_flags(flags)
    add = flags.add_argument
    add("--output-prefix", type=given_word, required=True, help="writes PREFIX.bin and PREFIX.idx")
    add_tokenizer_flags(flags, required=True)
    add("--append-eod", action="store_true", help="end each document with a separator")
    separator = "the separator of --append-eod, if it is not the tokenizer's eos_token"
    add("--eod-id", type=int, metavar="ID", help=separator)
    add("--workers", type=int, default=cores(), help="worker processes (default: all cores)")
    add("--overwrite", action="store_true", help="replace an existing pair")
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return status_of(lambda: run(args), (DataError,))


def run(args: argparse.Namespace) -> None:
    """Write the pair and print what it holds. Raises DataError."""
    from megazero.data.preprocess import PreprocessJob, preprocess
    from megazero.system.unfinished import ended_in_order

    if args.workers < 1:
        raise DataError(f"--workers {args.workers}: must be at least 1")
    job = PreprocessJob(args.tokenizer, args.tokenizer_path, reader_of(args), args.append_eod, args.eod_id)
    with ended_in_order():
        pair = preprocess(
            args.input, args.output_prefix, job, workers=args.workers, report=to_stderr, overwrite=args.overwrite
        )
    contents = f"{counted(pair.documents, 'document')}, {counted(pair.tokens, 'token')} ({pair.dtype})"
    print(f"{contents} in {pair.bin_path} and {pair.idx_path}")
