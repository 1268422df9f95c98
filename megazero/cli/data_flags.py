"""Flags of the commands that read text. They mean the same in every command."""

from __future__ import annotations

import argparse
import os

from megazero.cli.parser import given_word
from megazero.data.input_files import JSON_ENDINGS, ReaderOptions
from megazero.data.tokenizer import KINDS


def add_reader_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        type=given_word,
        required=True,
        help="files and folders (recursive): jsonl or text, also .gz and .zst",
    )
    parser.add_argument(
        "--include", nargs="+", default=(), metavar="PATTERN", help="in folders, only files that match, as '*.txt'"
    )
    parser.add_argument("--json-key", default="text", help="key of the text in a line of jsonl")
    parser.add_argument(
        "--format",
        default="auto",
        choices=("auto", "jsonl", "text"),
        help=f"auto: {', '.join(JSON_ENDINGS)} are jsonl, other files text",
    )
    parser.add_argument("--document", default="file", choices=("file", "line"), help="what a document of plain text is")
    parser.add_argument(
        "--encoding-errors",
        default="strict",
        choices=("strict", "replace"),
        help="bytes that are not UTF-8: strict stops, replace makes them U+FFFD and prints their number",
    )
    parser.add_argument(
        "--skip-undecodable", action="store_true", help="leave out documents that are not UTF-8; prints their number"
    )


def reader_of(args: argparse.Namespace) -> ReaderOptions:
    return ReaderOptions(
        args.json_key, args.format, args.document, args.encoding_errors, tuple(args.include), args.skip_undecodable
    )


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--tokenizer", choices=tuple(KINDS), required=required, help="kind of tokenizer")
    parser.add_argument(
        "--tokenizer-path", help="gpt2: folder of vocab.json and merges.txt; sentencepiece: .model; hf: tokenizer.json"
    )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
