"""`megazero inspect-data`: its flags; `samples` does what they say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.data_flags import add_tokenizer_flags
from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_word
from megazero.config.schema import DataConfig
from megazero.data.indexed import DataError

DESCRIPTION = """
A description of data: documents, tokens, lengths. With --seq-length also what training reads of them: samples of each
split and their text, in the order of a run.
"""
EXAMPLES = (
    "megazero inspect-data --data-path data/mine",
    "megazero inspect-data --data-path 0.7 data/a 0.3 data/b --seq-length 2048 --samples 4000,200,20",
    "python tools/inspect_data.py --data-path data/mine --split 969,30,1 --seq-length 2048 --dump samples.npz",
)


def parser() -> argparse.ArgumentParser:
    made = command_parser("inspect-data", DESCRIPTION, EXAMPLES)
    made.add_argument("--data-path", nargs="+", type=given_word, required=True, help="PREFIX, or WEIGHT PREFIX pairs")
    made.add_argument("--valid-data-path", nargs="+", default=(), help="NAME PREFIX pairs: named validation sets")
    made.add_argument("--split", default=DataConfig.split, help="shares of train, validation and test")
    made.add_argument("--seq-length", type=int, help="tokens of a sample, S; samples are shown with S+1")
    made.add_argument("--seed", type=int, default=DataConfig.seed)
    made.add_argument(
        "--samples",
        metavar="TRAIN,VALID,TEST",
        help="samples of the run: several epochs are shuffled together, in another order than one (default: one epoch "
        "of each)",
    )
    made.add_argument("--dump", type=given_word, metavar="FILE.npz", help="write arrays train, valid, test and lengths")
    made.add_argument("--first", type=int, default=64, help="samples of each split in the dump")
    made.add_argument("--show", type=int, default=1, help="samples of each split to print")
    made.add_argument("--vocab-size", type=int, help="refuse ids that are not below this (default: the tokenizer's)")
    made.add_argument("--data-cache-path", help="folder of index caches")
    add_tokenizer_flags(made, required=False)
    return made


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from megazero.cli.samples import run

    return status_of(lambda: run(args), (DataError,))
