"""`megazero prepare-data`: text into a .bin/.idx pair for training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.data_flags import add_reader_flags, add_tokenizer_flags, cores, reader_of
from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_word
from megazero.data.indexed import DataError
from megazero.data.preprocess import PreprocessJob, preprocess
from megazero.data.progress import to_stderr
from megazero.system.unfinished import ended_in_order
from megazero.system.words import counted

DESCRIPTION = "Turn text (jsonl or plain; .gz, .zst; folders) into PREFIX.bin and PREFIX.idx for training, or neither."
EXAMPLES = (
    "megazero prepare-data --input corpus/ more.jsonl.zst --output-prefix data/mine --tokenizer byte --append-eod",
    "python tools/preprocess_data.py --input corpus/ --output-prefix data/mine --tokenizer gpt2 --tokenizer-path DIR",
)


def parser() -> argparse.ArgumentParser:
    made = command_parser("prepare-data", DESCRIPTION, EXAMPLES)
    add_reader_flags(made)
    made.add_argument("--output-prefix", type=given_word, required=True, help="writes PREFIX.bin and PREFIX.idx")
    add_tokenizer_flags(made, required=True)
    made.add_argument("--append-eod", action="store_true", help="end each document with a separator")
    made.add_argument(
        "--eod-id", type=int, metavar="ID", help="the separator of --append-eod, if it is not the tokenizer's eos_token"
    )
    made.add_argument("--workers", type=int, default=cores(), help="worker processes (default: all cores)")
    made.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    return made


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return status_of(lambda: prepare(args), (DataError,))


def prepare(args: argparse.Namespace) -> None:
    if args.workers < 1:
        raise DataError(f"--workers {args.workers}: must be at least 1")
    job = PreprocessJob(args.tokenizer, args.tokenizer_path, reader_of(args), args.append_eod, args.eod_id)
    with ended_in_order():
        done = preprocess(
            args.input, args.output_prefix, job, workers=args.workers, report=to_stderr, overwrite=args.overwrite
        )
    print(
        f"{counted(done.documents, 'document')}, {counted(done.tokens, 'token')} ({done.dtype}) in "
        f"{done.bin_path} and {done.idx_path}"
    )
