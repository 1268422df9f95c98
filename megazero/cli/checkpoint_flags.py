"""Flags of the commands that open a checkpoint: its path and its format. They mean the same in every command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from megazero.cli.parser import given_path
from megazero.convert.names import FORMATS, missing_path_message


def add_checkpoint_flags(flags: argparse.ArgumentParser, *more: str, metavar: str = "CHECKPOINT") -> None:
    """Add the flags. more: further names of --load. metavar: the checkpoint's name in the help."""
    flags.add_argument(
        "paths",
        nargs="*",
        type=given_path,
        metavar=metavar,
        help="a checkpoint of any format, or a folder of them (the newest is taken)",
    )
    flags.add_argument(
        "--load",
        *more,
        dest="load",
        type=given_path,
        metavar="CHECKPOINT",
        help="the same: a checkpoint may be named either way",
    )
    flags.add_argument("--from", dest="format", choices=FORMATS, help="its format (default: recognised by its files)")


def named_checkpoints(args: argparse.Namespace) -> list[Path]:
    """The checkpoints on the command line; that of --load comes first."""
    return [path.expanduser() for path in ([] if args.load is None else [args.load]) + args.paths]


def checkpoint_problems(args: argparse.Namespace) -> Iterator[str]:
    """The problems of a command line that must name exactly one checkpoint."""
    named = named_checkpoints(args)
    if not named:
        yield "there is no checkpoint: name one, as it is or by --load"
    elif len(named) > 1:
        yield f"{len(named)} checkpoints, {' '.join(map(str, named))}: name one; other words follow a --flag"
    elif not os.path.exists(named[0]):
        yield missing_path_message(named[0])


def checkpoint_of(args: argparse.Namespace) -> Path:
    """The one checkpoint of a command line that `checkpoint_problems` has checked."""
    return named_checkpoints(args)[0]
