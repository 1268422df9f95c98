"""`megazero convert`: its flags; `conversion` does what they say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.checkpoint_flags import add_checkpoint_flags
from megazero.cli.exit_status import status_of
from megazero.cli.model_flags import PRECISIONS
from megazero.cli.parser import command_parser, given_path
from megazero.convert.names import FORMATS

DESCRIPTION = """
Convert a checkpoint of any known format into any other. Weights stay bit for bit what they are, unless --dtype asks for
others.
"""
EXAMPLES = (
    "megazero convert bloom-560m --to megazero --output runs/bloom --verify",
    "megazero convert runs/mine --to megatron-deepspeed --tp 4 --pp 12 --dp 8 --output mine-ds",
    "python tools/convert_checkpoint.py --input runs/mine --to hf --output mine-hf --verify",
)


def parser() -> argparse.ArgumentParser:
    made = command_parser("convert", DESCRIPTION, EXAMPLES)
    add_checkpoint_flags(made, "--input")
    made.add_argument("--output", required=True, type=given_path, metavar="DIR", help="a folder that is not there yet")
    made.add_argument("--to", required=True, choices=FORMATS, help="format to write")
    made.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the target, where it has a layout")
    made.add_argument("--pp", type=int, default=1, help="pipeline stages of the target, where it has a layout")
    made.add_argument("--dp", type=int, default=1, help="data-parallel ranks that the target's optimizer files are for")
    made.add_argument("--dtype", choices=PRECISIONS, help="of the model's weights; default: what the model computes in")
    made.add_argument(
        "--without-tokenizer", action="store_true", help="hf: write a model whose tokenizer is not there any more"
    )
    made.add_argument(
        "--vocab-size", type=int, metavar="V", help="leave out rows beyond these, the padding of another program"
    )
    made.add_argument(
        "--verify",
        action="store_true",
        help="compare every tensor afterwards, and the logits where the model fits in memory",
    )
    return made


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from megazero.cli.conversion import MISTAKES, run

    return status_of(lambda: run(args), MISTAKES)
