"""`megazero merge-data`: several .bin/.idx pairs into one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_word
from megazero.data.indexed import DataError
from megazero.system.words import counted

DESCRIPTION = "Join .bin/.idx pairs of one tokenizer in the order given; the widest dtype wins. Whole or not at all."
EXAMPLES = (
    "megazero merge-data --input data/a data/b --output-prefix data/all",
    "python tools/merge_data.py --input data/a data/b data/c --output-prefix data/all --overwrite",
)


def parser() -> argparse.ArgumentParser:
    flags = command_parser("merge-data", DESCRIPTION, EXAMPLES)
    add = flags.add_argument
    add("--input", nargs="+", type=given_word, required=True, help="prefixes of .bin/.idx pairs")
    add("--output-prefix", type=given_word, required=True, help="writes PREFIX.bin and PREFIX.idx")
    add("--overwrite", action="store_true", help="replace an existing pair")
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return status_of(lambda: run(args), (DataError,))


def run(args: argparse.Namespace) -> None:
    """Write the pair and print what it holds. Raises DataError."""
    from megazero.data.writer import merge
    from megazero.system.unfinished import ended_in_order

    with ended_in_order():
        pair = merge(args.input, args.output_prefix, overwrite=args.overwrite)
    contents = f"{counted(pair.documents, 'document')}, {counted(pair.tokens, 'token')} ({pair.dtype})"
    print(f"{contents} in {pair.bin_path} and {pair.idx_path}")
