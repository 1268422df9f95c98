"""`megazero inspect`: its flags; `inspection` does what they say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.checkpoint_flags import add_checkpoint_flags, named_checkpoints
from megazero.cli.data_flags import cores
from megazero.cli.parser import command_parser

DESCRIPTION = """
The contents of a checkpoint, or the differences of two.

PATH is a checkpoint of megazero, a folder of them (its checkpoints are listed, and the newest is shown), or a
checkpoint of any other format that `megazero convert` reads. With two PATHs the differences are shown. A checkpoint of
adapters (--lora-rank) is shown as it is; for a comparison with a model, the adapters are merged with their base. Values
are read in pieces, so memory does not grow with the model.

Status: 0; 1 if a checkpoint is damaged, or with --exit-code if two differ; 2 for a mistake in the arguments; 141 if
nobody reads the output any more.
"""
EXAMPLES = (
    "megazero inspect runs/bloom",
    "megazero inspect runs/bloom/iter_0001000 --verify --all",
    "megazero inspect runs/bloom --tensor 'blocks.*.mlp.up.weight'",
    "python tools/inspect_checkpoint.py runs/bloom/iter_0001000 runs/other --exit-code",
)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("inspect", DESCRIPTION, EXAMPLES)
    add_checkpoint_flags(parser, metavar="PATH")
    parser.add_argument(
        "--verify", action="store_true", help="check every hash (other programs' formats have none: read everything)"
    )
    parser.add_argument(
        "--tensor",
        metavar="NAME",
        help="statistics of a tensor, or of all whose names match a pattern (blocks.*.weight)",
    )
    parser.add_argument(
        "--all", action="store_true", help="show every field of the configuration, equal tensors and all files too"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--exit-code", action="store_true", help="with OTHER: status 1 where tensors or the model's shape differ"
    )
    parser.add_argument(
        "--threads", type=int, default=cores(), help="that hash at once (default: the cores, %(default)s)"
    )
    args = parser.parse_args(argv)
    named = named_checkpoints(args)
    if len(named) not in (1, 2):
        parser.error(
            f"{len(named)} checkpoints: name one to look at, or two to compare, as they are or the first by --load"
        )
    args.path, args.other = named[0], named[1] if len(named) == 2 else None
    if args.other is not None and (args.verify or args.tensor):
        parser.error("--verify and --tensor look at one checkpoint: leave OTHER out")
    if args.exit_code and args.other is None:
        parser.error("--exit-code is about two checkpoints: give OTHER too")
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: must be at least 1")
    return args


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    from megazero.cli.inspection import run

    return run(args)
