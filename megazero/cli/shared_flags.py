"""Flags that several commands have, with the same meaning in each: a checkpoint and its format, a tokenizer, text to
read, the ranks that share a model.

Every command imports this file for its help, so the functions that do a command's work import what is slow.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megazero.cli.exit_status import end_rank
from megazero.cli.parser import Parser, given_path, given_word, not_positive
from megazero.config.schema import OptimizerConfig, ParallelConfig, Run
from megazero.config.source import ConfigSource
from megazero.convert.names import FORMATS, missing_path_message
from megazero.data.indexed import DataError
from megazero.data.input_files import JSON_ENDINGS, ReaderOptions
from megazero.data.tokenizer import KINDS, ListedTokenizer, build_tokenizer
from megazero.system.hub import HubError, folder_of

if TYPE_CHECKING:
    from megazero.convert.loading import LoadedModel
    from megazero.mpu.grid import ProcessGrid
    from megazero.mpu.meeting import Environment

Flags = argparse.ArgumentParser | argparse._ArgumentGroup
PRECISIONS: tuple[str, ...] = OptimizerConfig.__dataclass_fields__["precision"].metadata["choices"]


def add_checkpoint_flags(flags: Flags, *aliases: str, metavar: str = "CHECKPOINT") -> None:
    """Add the flags that name checkpoints. aliases: further names of --load. metavar: of a checkpoint in the help."""
    add = flags.add_argument
    newest = "a checkpoint of any format, a folder of them (the newest is taken), or ORG/NAME on Hugging Face's Hub"
    add("paths", nargs="*", type=given_path, metavar=metavar, help=newest)
    either = "the same: a checkpoint may be named either way"
    add("--load", *aliases, dest="load", type=given_path, metavar="CHECKPOINT", help=either)
    # `dest`, because an argument `from` could not be written as args.from.
    add("--from", dest="format", choices=FORMATS, help="its format (default: recognised by its files)")


def named_checkpoints(args: argparse.Namespace) -> list[Path]:
    """The checkpoints on the command line; that of --load comes first."""
    return [path.expanduser() for path in ([] if args.load is None else [args.load]) + args.paths]


def checkpoint_problems(args: argparse.Namespace) -> Iterator[str]:
    """The problems of a command line that must name exactly one checkpoint."""
    paths = named_checkpoints(args)
    if not paths:
        yield "there is no checkpoint: name one, as it is or by --load"
    elif len(paths) > 1:
        yield f"{len(paths)} checkpoints, {' '.join(map(str, paths))}: name one; other words follow a --flag"
    else:
        try:
            folder = folder_of(paths[0])  # before ranks meet, who would wait for what is fetched
        except HubError as error:
            yield str(error)
        else:
            if not os.path.exists(folder):
                yield missing_path_message(folder)


def checkpoint_of(args: argparse.Namespace) -> Path:
    """The one checkpoint of a command line that `checkpoint_problems` has checked, of a name of the Hub its folder."""
    return folder_of(named_checkpoints(args)[0])


def add_text_flags(flags: Flags, *, corpus: bool = False, required: bool = True) -> None:
    """Add the flags that say which text is read, and how.

    corpus: whether the text is the whole input of the command, of which parts can be left out. required: whether a
    corpus must be named by --input.
    """
    add = flags.add_argument
    required = corpus and required
    files = "files and folders (recursive): jsonl or text, also .gz and .zst"
    add("--input", nargs="+", type=given_word, required=required, default=[], metavar="FILE", help=files)
    add("--json-key", default="text", help="key of the text in a line of jsonl")
    formats = f"auto: {', '.join(JSON_ENDINGS)} are jsonl, other files text"
    # `dest`, because `format` is a checkpoint's.
    add("--format", dest="text_format", default="auto", choices=("auto", "jsonl", "text"), help=formats)
    add("--document", default="file", choices=("file", "line"), help="what a document of plain text is")
    counts = " and prints their number" if corpus else ""
    errors = f"bytes that are not UTF-8: strict stops, replace makes them U+FFFD{counts}"
    add("--encoding-errors", default="strict", choices=("strict", "replace"), help=errors)
    if not corpus:
        flags.set_defaults(include=(), skip_undecodable=False)  # for `reader_of`
        return
    add("--include", nargs="+", default=(), metavar="PATTERN", help="in folders, only files that match, as '*.txt'")
    add("--skip-undecodable", action="store_true", help="leave out documents that are not UTF-8; prints their number")


def reader_of(args: argparse.Namespace) -> ReaderOptions:
    """How the flags of `add_text_flags` say that text is read."""
    form = args.json_key, args.text_format, args.document, args.encoding_errors
    return ReaderOptions(*form, tuple(args.include), args.skip_undecodable)


def add_tokenizer_flags(flags: Flags, *, required: bool = False, default: str = "") -> None:
    """Add the flags that name a tokenizer. default: in words, the tokenizer without them."""
    flags.add_argument("--tokenizer", choices=tuple(KINDS), required=required, help=f"kind of tokenizer{default}")
    files = (
        "gpt2: folder of vocab.json and merges.txt; sentencepiece: .model; hf: tokenizer.json; all: ORG/NAME of the Hub"
    )
    flags.add_argument("--tokenizer-path", help=files)


def tokenizer_named(args: argparse.Namespace, loaded: LoadedModel) -> ListedTokenizer | None:
    """The tokenizer that the flags name, else the checkpoint's own; None without either.

    Raises DataError, also for another tokenizer than the checkpoint's own: its ids would be other text.
    """
    from megazero.data.tokenizer_record import tokenizer_record

    if not args.tokenizer:
        return loaded.tokenizer
    tokenizer = build_tokenizer(args.tokenizer, args.tokenizer_path)
    if loaded.tokenizer is not None:
        named_record = tokenizer_record(tokenizer, args.tokenizer)
        own_record = tokenizer_record(loaded.tokenizer, "one")
        if named_record.hash != own_record.hash:
            path = f" --tokenizer-path {args.tokenizer_path}" if args.tokenizer_path else ""
            raise DataError(
                f"--tokenizer {args.tokenizer}{path} is another tokenizer ({named_record}) than "
                f"the model's own ({own_record}), so its ids would be other text; without the flags the model's counts"
            )
    return tokenizer


def no_tokenizer_message(args: argparse.Namespace, loaded: LoadedModel) -> str:
    """Why a model has no tokenizer, and the flags that name one, with those that the data of its training record."""
    from megazero.convert.tokenizers import no_tokenizer
    from megazero.data.build import parse_data_path
    from megazero.data.tokenizer_record import recorded_flags

    recorded = None
    with suppress(DataError):  # the data may be gone since the training
        recorded = recorded_flags(parse_data_path(loaded.run.data.data_path).prefixes)
    flags = "--tokenizer and --tokenizer-path" + (f" ({recorded})" if recorded is not None else "")
    return f"{checkpoint_of(args)} {no_tokenizer(loaded.report)}; name one by {flags}"


def add_layout_flags(flags: Parser) -> None:
    """Add the flags of the ranks that share a model, and of what they compute in."""
    flags.of_ranks = True
    add = flags.add_argument_group("ranks").add_argument
    add("--precision", choices=PRECISIONS, help="to compute in (default: the checkpoint's)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    add("--pp", type=int, default=1, help="pipeline stages (%(default)s)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where tensors live (%(default)s)")
    add("--distributed-timeout-minutes", type=float, default=10.0, help="a rank waits so long for others (%(default)s)")


def run_on_grid(
    args: argparse.Namespace,
    check: Callable[[argparse.Namespace, int], None],
    work: Callable[[argparse.Namespace, ProcessGrid], None],
    mistakes: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Do a command's work as one rank of the grid that the flags of `add_layout_flags` describe; end the process.

    check     raises ConfigError for problems of the flags; it gets the world size
    work      a collective of all ranks
    mistakes  exceptions of the work for a user's mistake, besides ConversionError and DataError
    """
    from megazero.convert.source import ConversionError
    from megazero.launch import launch

    def checked_work(environment: Environment) -> None:
        check(args, environment.world_size)
        minutes = args.distributed_timeout_minutes
        parallel = ParallelConfig(tp=args.tp, pp=args.pp, device=args.device, distributed_timeout_minutes=minutes)
        with launch(Run(parallel=parallel), environment) as grid:
            require_same_flags(args, grid)
            work(args, grid)

    end_rank(checked_work, (ConversionError, DataError, *mistakes))


_OF_RANK_0 = {"prompt", "prompt_file", "input", "output", "json"}
"""What only rank 0 reads or writes."""
_PLACES = {"paths", "load", "tokenizer_path", "data_path"}
"""What may have another name on each host."""


def require_same_flags(args: argparse.Namespace, grid: ProcessGrid) -> None:
    """Raise ConfigError on all ranks if one of them has other flags than rank 0, or another checkpoint: they would
    share out two models. torchrun starts all ranks with the same words; whoever starts ranks by hand may err.

    A collective of the world, if it has several ranks: what `found_by_rank_0` and `attempt_on_all_ranks` communicate.
    """
    from megazero.checkpoint.agreement import attempt_on_all_ranks, found_by_rank_0
    from megazero.config.source import ConfigError
    from megazero.convert.registry import open_source
    from megazero.train.same_run import ends_of

    def identity() -> dict[str, str]:
        flags = {name: value for name, value in vars(args).items() if name not in _OF_RANK_0 | _PLACES}
        with open_source(checkpoint_of(args), args.format) as source:
            ends = ends_of(source.path)
        return {f"--{name.replace('_', '-')}": f"{value}" for name, value in flags.items()} | ends

    def compare() -> None:
        mine = identity()
        for name in {**first, **mine}:
            here, there = (values.get(name, "none") for values in (mine, first))
            if here != there:
                raise ConfigError([f"{name}: {here} on rank {grid.rank}, {there} on rank 0; all ranks need the same"])

    if grid.world.size > 1:
        first = found_by_rank_0(grid.world, grid.device, identity)
        attempt_on_all_ranks(grid.world, grid.device, compare)


def model_problems(args: argparse.Namespace, world_size: int, *, replicas: bool) -> Iterator[str]:
    """The problems of the flags of a checkpoint, of the ranks that share its model, and of its tokenizer.

    replicas: whether tp x pp ranks may be there several times.
    """
    yield from checkpoint_problems(args)
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


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def model_of(path: str) -> ConfigSource:
    """The settings of the checkpoint of --init-from. Only a run with that flag waits for torch."""
    from megazero.train.init_from import model_source

    return model_source(path)
