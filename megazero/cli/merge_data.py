"""`megazero merge-data`: several .bin/.idx pairs into one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_word
from megazero.data.indexed import DataError
from megazero.data.writer import merge
from megazero.system.unfinished import ended_in_order
from megazero.system.words import counted

DESCRIPTION = "Join .bin/.idx pairs of one tokenizer in the order given; the widest dtype wins. Whole or not at all."
EXAMPLES = (
    "megazero merge-data --input data/a data/b --output-prefix data/all",
    "python tools/merge_data.py --input data/a data/b data/c --output-prefix data/all --overwrite",
)


def parser() -> argparse.ArgumentParser:
    made = command_parser("merge-data", DESCRIPTION, EXAMPLES)
    made.add_argument("--input", nargs="+", type=given_word, required=True, help="prefixes of .bin/.idx pairs")
    made.add_argument("--output-prefix", type=given_word, required=True, help="writes PREFIX.bin and PREFIX.idx")
    made.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    return made


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return status_of(lambda: merge_pairs(args), (DataError,))


def merge_pairs(args: argparse.Namespace) -> None:
    with ended_in_order():
        done = merge(args.input, args.output_prefix, overwrite=args.overwrite)
    print(
        f"{counted(done.documents, 'document')}, {counted(done.tokens, 'token')} ({done.dtype}) in "
        f"{done.bin_path} and {done.idx_path}"
    )
