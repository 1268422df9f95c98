"""`megazero inspect-data`: it describes data, and the samples that a training run would read of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_word
from megazero.cli.shared_flags import add_tokenizer_flags
from megazero.config.schema import DataConfig
from megazero.data.indexed import DataError
from megazero.data.progress import to_stderr
from megazero.data.tokenizer import ListedTokenizer, build_tokenizer

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
    flags = command_parser("inspect-data", DESCRIPTION, EXAMPLES)
    add = flags.add_argument
    add("--data-path", nargs="+", type=given_word, required=True, help="PREFIX, or WEIGHT PREFIX pairs")
    add("--valid-data-path", nargs="+", default=(), help="NAME PREFIX pairs: named validation sets")
    add("--split", default=DataConfig.split, help="shares of train, validation and test")
    add("--seq-length", type=int, help="tokens of a sample, S; samples are shown with S+1")
    add("--seed", type=int, default=DataConfig.seed)
    epochs = "several epochs are shuffled together, in another order than one (default: one epoch of each)"
    add("--samples", metavar="TRAIN,VALID,TEST", help=f"samples of the run: {epochs}")
    add("--dump", type=given_word, metavar="FILE.npz", help="write arrays train, valid, test and lengths")
    add("--first", type=int, default=64, help="samples of each split in the dump")
    add("--show", type=int, default=1, help="samples of each split to print")
    add("--vocab-size", type=int, help="refuse ids that are not below this (default: the tokenizer's)")
    add("--data-cache-path", help="folder of index caches")
    add_tokenizer_flags(flags)
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return status_of(lambda: run(args), (DataError,))


def run(args: argparse.Namespace) -> None:
    """Print the description. Raises DataError."""
    from megazero.data.build import parse_data_path, parse_valid_data_path
    from megazero.data.inspect import check_dump, summary
    from megazero.data.tokenizer_record import require_tokenizer

    if args.seq_length is None and (args.dump is not None or args.samples):
        flag = "--dump" if args.dump is not None else "--samples"
        raise DataError(f"{flag} needs --seq-length: the tokens of a sample")
    if args.dump is not None:
        check_dump(Path(args.dump), args.first)
    named = (*parse_data_path(args.data_path).prefixes, *parse_valid_data_path(args.valid_data_path).values())
    prefixes = list(dict.fromkeys(named))  # each once, in the order of the flags
    tokenizer = build_tokenizer(args.tokenizer, args.tokenizer_path) if args.tokenizer else None
    if tokenizer is not None:
        require_tokenizer(prefixes, tokenizer, args.tokenizer)
    for prefix in prefixes:
        print(summary(prefix))
    if args.seq_length is not None:
        _show_samples(args, tokenizer)


def _show_samples(args: argparse.Namespace, tokenizer: ListedTokenizer | None) -> None:
    """Print, and dump if requested, the samples that a run with these flags would read."""
    from megazero.data.build import build_datasets
    from megazero.data.inspect import describe, dump, parse_samples

    data = DataConfig(
        data_path=tuple(args.data_path),
        split=args.split,
        valid_data_path=tuple(args.valid_data_path),
        data_cache_path=args.data_cache_path,
        seed=args.seed,
        tokenizer=args.tokenizer,
    )
    samples = parse_samples(args.samples)
    datasets = build_datasets(
        data,
        seq_length=args.seq_length,
        samples=samples,
        vocab_size=args.vocab_size or (tokenizer.vocab_size if tokenizer else None),
        tokenizer=tokenizer,
        named_samples=samples[1],
        report=to_stderr,
    )
    if args.dump:
        dump(datasets, Path(args.dump), args.first)
    print(describe(datasets, tokenizer, args.show))
