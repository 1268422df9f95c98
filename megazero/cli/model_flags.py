"""Flags of the commands that open a trained model: its tokenizer, and the layout on which it is opened.

`checkpoint_flags` has the flags that name the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from megazero.config.options import run_options
from megazero.config.schema import ParallelConfig
from megazero.data.build import parse_data_path
from megazero.data.indexed import DataError
from megazero.data.tokenizer import KINDS, ListedTokenizer, build_tokenizer
from megazero.data.tokenizer_record import recorded_flags, tokenizer_record

if TYPE_CHECKING:
    from megazero.convert.loading import LoadedModel

PRECISIONS = run_options()["precision"].choices
MOST_TOKENS = 128
"""The most tokens of a continuation, if neither flags nor the model's files set a limit."""


def add_tokenizer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer", choices=tuple(KINDS), help="kind of tokenizer (default: the checkpoint's own)")
    group.add_argument("--tokenizer-path", help="folder or file of --tokenizer")


def add_layout_flags(flags: argparse.ArgumentParser) -> None:
    ranks = flags.add_argument_group("ranks")
    ranks.add_argument("--precision", choices=PRECISIONS, help="to compute in (default: the checkpoint's)")
    ranks.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    ranks.add_argument("--pp", type=int, default=1, help="pipeline stages (%(default)s)")
    ranks.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="where tensors live (%(default)s)"
    )
    ranks.add_argument(
        "--distributed-timeout-minutes", type=float, default=10.0, help="a rank waits so long for others (%(default)s)"
    )


def parallel_of(args: argparse.Namespace) -> ParallelConfig:
    return ParallelConfig(
        tp=args.tp, pp=args.pp, device=args.device, distributed_timeout_minutes=args.distributed_timeout_minutes
    )


def problems(args: argparse.Namespace, world_size: int, *, replicas: bool) -> Iterator[str]:
    """The problems of these flags. replicas: whether there may be several replicas of tp x pp ranks."""
    yield from not_positive(args, "tp", "pp")
    size = args.tp * args.pp
    if min(args.tp, args.pp) > 0 and (world_size % size if replicas else world_size != size):
        started = "1 process was started" if world_size == 1 else f"{world_size} processes were started"
        yield (
            f"--tp {args.tp} x --pp {args.pp} = {size} ranks, but {started}"
            + (", no multiple of it" if replicas else "")
            + f"; to start {size}: torchrun --nproc-per-node {size} -m megazero and the words of this command"
        )
    if args.tokenizer_path and not args.tokenizer:
        yield "--tokenizer-path: --tokenizer says of which kind it is"


def not_positive(args: argparse.Namespace, *names: str) -> Iterator[str]:
    """A sentence for each of these flags that is given and below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} {value}: must be at least 1"


def tokenizer_named(args: argparse.Namespace, loaded: LoadedModel) -> ListedTokenizer | None:
    """The tokenizer that the flags name, else the checkpoint's own; None without either.

    Raises DataError, also for another tokenizer than the checkpoint's own: its ids would be other text.
    """
    if not args.tokenizer:
        return loaded.tokenizer
    named = build_tokenizer(args.tokenizer, args.tokenizer_path)
    if loaded.tokenizer is not None:
        asked, known = tokenizer_record(named, args.tokenizer), tokenizer_record(loaded.tokenizer, "one")
        if asked.hash != known.hash:
            path = f" --tokenizer-path {args.tokenizer_path}" if args.tokenizer_path else ""
            raise DataError(
                f"--tokenizer {args.tokenizer}{path} is another tokenizer ({asked}) than "
                f"the model's own ({known}), so its ids would be other text; without the flags the model's counts"
            )
    return named


def ways_to_name_one(loaded: LoadedModel) -> str:
    """The flags that name a tokenizer, for a model without one; with what the data of its training record of theirs."""
    flags = "--tokenizer and --tokenizer-path"
    with suppress(DataError):
        recorded = recorded_flags(parse_data_path(loaded.run.data.data_path).prefixes)
        return flags if recorded is None else f"{flags} ({recorded})"
    return flags
