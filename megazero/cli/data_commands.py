"""The commands that make and describe data: prepare-data, merge-data, train-tokenizer and inspect-data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.cli.exit_status import status_of
from megazero.cli.parser import Parser, command_parser, flag_of, given_word, not_positive
from megazero.cli.shared_flags import add_text_flags, add_tokenizer_flags, cores, reader_of
from megazero.config.schema import DataConfig
from megazero.data.indexed import DataError
from megazero.data.input_files import ReaderOptions
from megazero.data.progress import to_stderr
from megazero.data.tokenizer import ListedTokenizer, build_tokenizer
from megazero.system.words import counted

if TYPE_CHECKING:
    from megazero.data.writer import PairWriter

PREPARE = """
Turn text into PREFIX.bin and PREFIX.idx for training, or neither. The text is that of files (jsonl or plain; .gz, .zst;
folders), or of a data set of the package datasets: by its name on Hugging Face's Hub, or a folder or file of it here.
"""
PREPARE_EXAMPLES = (
    "megazero prepare-data --dataset ORG/NAME --split train --column text --output-prefix data/mine --tokenizer byte",
    "megazero prepare-data --input corpus/ more.jsonl.zst --output-prefix data/mine --tokenizer byte --append-eod",
    "python tools/preprocess_data.py --input corpus/ --output-prefix data/mine --tokenizer gpt2 --tokenizer-path DIR",
)
MERGE = "Join .bin/.idx pairs of one tokenizer in the order given; the widest dtype wins. Whole or not at all."
MERGE_EXAMPLES = (
    "megazero merge-data --input data/a data/b --output-prefix data/all",
    "python tools/merge_data.py --input data/a data/b data/c --output-prefix data/all --overwrite",
)
TRAIN = """
Train a byte-level BPE on text; writes vocab.json and merges.txt, with --chat tokenizer.json.

Then: --tokenizer gpt2 --tokenizer-path TOKENIZER, with --chat: --tokenizer hf --tokenizer-path TOKENIZER
"""
TRAIN_EXAMPLES = (
    "megazero train-tokenizer --input corpus/ --vocab-size 32000 --output TOKENIZER",
    "python tools/train_tokenizer.py --input corpus/ --include '*.txt' --vocab-size 32000 --chat --output TOKENIZER",
)
INSPECT = """
A description of data: documents, tokens, lengths. With --seq-length also what training reads of them: samples of each
split and their text, in the order of a run.
"""
INSPECT_EXAMPLES = (
    "megazero inspect-data --data-path data/mine",
    "megazero inspect-data --data-path 0.7 data/a 0.3 data/b --seq-length 2048 --samples 4000,200,20",
    "python tools/inspect_data.py --data-path data/mine --split 969,30,1 --seq-length 2048 --dump samples.npz",
)


def prepare_parser() -> Parser:
    flags = command_parser("prepare-data", PREPARE, PREPARE_EXAMPLES)
    add_text_flags(flags, corpus=True, required=False)
    add = flags.add_argument
    dataset = "instead of --input: ORG/NAME, ORG/NAME@REVISION, ORG/NAME:CONFIG, a folder or a .parquet file"
    add("--dataset", type=given_word, metavar="NAME", help=dataset)
    add("--split", help="of --dataset (train)")
    add("--column", help="of --dataset: where the text is (text)")
    add("--streaming", action="store_true", help="read --dataset as it comes, without a copy of all of it on the disk")
    add("--output-prefix", type=given_word, required=True, help="writes PREFIX.bin and PREFIX.idx")
    add_tokenizer_flags(flags, required=True)
    add("--append-eod", action="store_true", help="end each document with a separator")
    separator = "the separator of --append-eod, if it is not the tokenizer's eos_token"
    add("--eod-id", type=int, metavar="ID", help=separator)
    add("--workers", type=int, default=cores(), help="worker processes (default: all cores)")
    add("--overwrite", action="store_true", help="replace an existing pair")
    return flags


def prepare(args: argparse.Namespace) -> None:
    from megazero.data.dataset_rows import DatasetRows
    from megazero.data.preprocess import PreprocessJob, file_source, write_pair
    from megazero.system.unfinished import ended_in_order

    for problem in (*not_positive(args, "workers"), *_text_problems(args)):
        raise DataError(problem)
    reader = reader_of(args)
    if args.dataset is None:
        source = file_source(args.input, reader, to_stderr)
    else:
        rows = DatasetRows(args.dataset, args.split, args.column or "text", args.streaming)
        reader, source = ReaderOptions(json_key=rows.column), rows.source()
    job = PreprocessJob(args.tokenizer, args.tokenizer_path, reader, args.append_eod, args.eod_id)
    with ended_in_order():  # a signal leaves no unfinished file behind
        pair = write_pair(
            source, args.output_prefix, job, workers=args.workers, report=to_stderr, overwrite=args.overwrite
        )
    _print_contents(pair)


def _text_problems(args: argparse.Namespace) -> Iterator[str]:
    """What is wrong with the flags that name the text: of files or of a data set, and of nothing else."""
    if bool(args.input) == bool(args.dataset):
        told = "--input and --dataset exclude each other" if args.input else "there is no text"
        yield f"{told}: name files by --input, or a data set of the package datasets by --dataset"
    parser = prepare_parser()
    of_files = ("json_key", "text_format", "document", "encoding_errors", "include", "skip_undecodable")
    of_datasets = ("split", "column", "streaming")
    for fields, named, other in ((of_files, args.dataset, "--input"), (of_datasets, args.input, "--dataset")):
        changed = [field for field in fields if getattr(args, field) != parser.get_default(field)]
        flags = [flag_of(field.removeprefix("text_")) for field in changed]
        if named and changed:
            yield f"{' and '.join(flags)} {'goes' if len(flags) == 1 else 'go'} with {other}"


def merge_parser() -> Parser:
    flags = command_parser("merge-data", MERGE, MERGE_EXAMPLES)
    add = flags.add_argument
    add("--input", nargs="+", type=given_word, required=True, help="prefixes of .bin/.idx pairs")
    add("--output-prefix", type=given_word, required=True, help="writes PREFIX.bin and PREFIX.idx")
    add("--overwrite", action="store_true", help="replace an existing pair")
    return flags


def merge(args: argparse.Namespace) -> None:
    from megazero.data import writer
    from megazero.system.unfinished import ended_in_order

    with ended_in_order():
        pair = writer.merge(args.input, args.output_prefix, overwrite=args.overwrite)
    _print_contents(pair)


def _print_contents(pair: PairWriter) -> None:
    contents = f"{counted(pair.documents, 'document')}, {counted(pair.tokens, 'token')} ({pair.dtype})"
    print(f"{contents} in {pair.bin_path} and {pair.idx_path}")


def train_parser() -> Parser:
    flags = command_parser("train-tokenizer", TRAIN, TRAIN_EXAMPLES)
    add_text_flags(flags, corpus=True)
    add = flags.add_argument
    add("--vocab-size", type=int, default=32000, help="tokens, 256 bytes and the separator included")
    chat = "with tokens around the turns of a chat, and a chat template: for models that talk"
    add("--chat", action="store_true", help=chat)
    add("--output", type=given_word, required=True, help="folder for the files")
    add("--overwrite", action="store_true", help="replace an existing tokenizer of the same kind")
    return flags


def train(args: argparse.Namespace) -> None:
    from megazero.data.preprocess import texts
    from megazero.data.train_bpe import require_no_tokenizer, train_bpe

    require_no_tokenizer(args.output, chat=args.chat, overwrite=args.overwrite)
    corpus = texts(args.input, reader_of(args), to_stderr, "reading")
    first = next(corpus)  # what is wrong with the input is known before a folder is made
    train_bpe(chain([first], corpus), args.vocab_size, Path(args.output), to_stderr, chat=args.chat)
    to_stderr(f"the tokenizer is in {args.output}")


def inspect_parser() -> Parser:
    flags = command_parser("inspect-data", INSPECT, INSPECT_EXAMPLES)
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


def inspect(args: argparse.Namespace) -> None:
    from megazero.data.build import parse_data_path, parse_valid_data_path
    from megazero.data.inspect import check_dump, summary
    from megazero.data.tokenizer_record import require_tokenizer

    if args.seq_length is None and (args.dump is not None or args.samples):
        flag = "--dump" if args.dump is not None else "--samples"
        raise DataError(f"{flag} needs --seq-length: the tokens of a sample")
    if args.dump is not None:
        check_dump(Path(args.dump), args.first)
    validation_prefixes = parse_valid_data_path(args.valid_data_path).values()
    # Each once, in the order of the flags: a mixture may have the same pair several times.
    prefixes = list(dict.fromkeys([*parse_data_path(args.data_path).prefixes, *validation_prefixes]))
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


COMMANDS: Mapping[str, tuple[Callable[[], Parser], Callable[[argparse.Namespace], None]]] = MappingProxyType(
    {
        "prepare-data": (prepare_parser, prepare),
        "merge-data": (merge_parser, merge),
        "train-tokenizer": (train_parser, train),
        "inspect-data": (inspect_parser, inspect),
    }
)
"""The commands by name: the parser of the flags, and the work, which raises DataError for a user's mistake."""


def main(name: str, argv: Sequence[str]) -> int:
    """Run the command of this name, and return its status."""
    parser, work = COMMANDS[name]
    args = parser().parse_args(argv)
    return status_of(lambda: work(args), (DataError,))
