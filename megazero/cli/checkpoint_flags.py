"""Flags of the tools that open a checkpoint: which one, and its format. They mean the same in every tool."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from megazero.convert.names import FORMATS, not_there


def add_checkpoint_flags(flags: argparse.ArgumentParser, *more: str, metavar: str = "CHECKPOINT") -> None:
    """more: further names of --load."""
    flags.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar=metavar,
        help="a checkpoint of any format, or a folder of them (the newest is taken)",
    )
    flags.add_argument(
        "--load",
        *more,
        dest="load",
        type=Path,
        metavar="CHECKPOINT",
        help="the same: a checkpoint may be named either way",
    )
    flags.add_argument("--from", dest="format", choices=FORMATS, help="its format, where it is not to be recognised")


def named_checkpoints(args: argparse.Namespace) -> list[Path]:
    """Those of the command line, that of --load first."""
    return [path.expanduser() for path in ([] if args.load is None else [args.load]) + args.paths]


def checkpoint_problems(args: argparse.Namespace) -> Iterator[str]:
    """What is wrong where one checkpoint has to be named."""
    named = named_checkpoints(args)
    if not named:
        yield "there is no checkpoint: name one, as it is or by --load"
    elif len(named) > 1:
        yield f"{len(named)} checkpoints, {' '.join(map(str, named))}: name one"
    elif not named[0].exists():
        yield not_there(named[0])


def checkpoint_of(args: argparse.Namespace) -> Path:
    """The one that is named; `checkpoint_problems` has looked."""
    return named_checkpoints(args)[0]
