"""Show what data are, and, with a sequence length, show or dump the samples that a training run would read, in its
order.

python tools/inspect_data.py --data-path PREFIX python tools/inspect_data.py --data-path PREFIX --split 969,30,1
--seq-length 2048 --seed 1234 --samples 4000,200,20 --dump FILE.npz
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.config.schema import DataConfig
from megazero.data.build import build_datasets, parse_data_path, parse_valid_data_path
from megazero.data.indexed import DataError
from megazero.data.inspect import describe, dump, parse_samples, summary
from megazero.data.progress import to_stderr
from megazero.data.tokenizer import build_tokenizer
from megazero.data.tool import add_tokenizer_flags, run


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What data are: documents, tokens, lengths. With --seq-length what training reads of them: samples "
        "of each split and their text."
    )
    parser.add_argument("--data-path", nargs="+", required=True, help="PREFIX, or WEIGHT PREFIX pairs")
    parser.add_argument("--valid-data-path", nargs="+", default=(), help="NAME PREFIX pairs: named validation sets")
    parser.add_argument("--split", default=DataConfig.split, help="shares of train, validation and test")
    parser.add_argument("--seq-length", type=int, help="tokens of a sample, S; samples are shown with S+1")
    parser.add_argument("--seed", type=int, default=DataConfig.seed)
    parser.add_argument("--samples", help="TRAIN,VALID,TEST samples that the run asks for (default: one epoch of each)")
    parser.add_argument("--dump", metavar="FILE.npz", help="write arrays train, valid, test and lengths")
    parser.add_argument("--first", type=int, default=64, help="samples of each split in the dump")
    parser.add_argument("--show", type=int, default=1, help="samples of each split to print")
    parser.add_argument("--vocab-size", type=int, help="refuse ids that are not below this (default: the tokenizer's)")
    parser.add_argument("--data-cache-path", help="folder of index caches")
    add_tokenizer_flags(parser, required=False)
    args = parser.parse_args()
    if args.seq_length is None and (args.dump or args.samples):
        raise DataError(f"{'--dump' if args.dump else '--samples'} needs --seq-length: the tokens of a sample")
    for prefix in dict.fromkeys(
        (*parse_data_path(args.data_path).prefixes, *parse_valid_data_path(args.valid_data_path).values())
    ):
        print(summary(prefix))
    if args.seq_length is not None:
        samples(args)


def samples(args: argparse.Namespace) -> None:
    """What a run with these flags reads."""
    tokenizer = build_tokenizer(args.tokenizer, args.tokenizer_path) if args.tokenizer else None
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


if __name__ == "__main__":
    run(main)
