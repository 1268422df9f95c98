"""What `megazero inspect-data` does: it describes data, and the samples that a training run would read of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from megazero.config.schema import DataConfig
from megazero.data.build import build_datasets, parse_data_path, parse_valid_data_path
from megazero.data.indexed import DataError
from megazero.data.inspect import check_dump, describe, dump, parse_samples, summary
from megazero.data.progress import to_stderr
from megazero.data.tokenizer import ListedTokenizer, build_tokenizer
from megazero.data.tokenizer_record import require_tokenizer


def run(args: argparse.Namespace) -> None:
    """Print the description. Raises DataError."""
    if args.seq_length is None and (args.dump is not None or args.samples):
        raise DataError(
            f"{'--dump' if args.dump is not None else '--samples'} needs --seq-length: the tokens of a sample"
        )
    if args.dump is not None:
        check_dump(Path(args.dump), args.first)
    named = (*parse_data_path(args.data_path).prefixes, *parse_valid_data_path(args.valid_data_path).values())
    prefixes = list(dict.fromkeys(named))
    tokenizer = build_tokenizer(args.tokenizer, args.tokenizer_path) if args.tokenizer else None
    if tokenizer is not None:
        require_tokenizer(prefixes, tokenizer, args.tokenizer)
    for prefix in prefixes:
        print(summary(prefix))
    if args.seq_length is not None:
        _samples(args, tokenizer)


def _samples(args: argparse.Namespace, tokenizer: ListedTokenizer | None) -> None:
    """Print, and dump if requested, the samples that a run with these flags would read."""
    cfg = DataConfig(
        data_path=tuple(args.data_path),
        split=args.split,
        valid_data_path=tuple(args.valid_data_path),
        data_cache_path=args.data_cache_path,
        seed=args.seed,
        tokenizer=args.tokenizer,
    )
    vocab_size = args.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    asked = parse_samples(args.samples)
    datasets = build_datasets(
        cfg,
        seq_length=args.seq_length,
        samples=asked,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        named_samples=asked[1],
        report=to_stderr,
    )
    if args.dump:
        dump(datasets, Path(args.dump), args.first)
    print(describe(datasets, tokenizer, args.show))
