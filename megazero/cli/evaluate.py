"""`megazero evaluate`: its flags; `evaluation` does what they say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.checkpoint_flags import add_checkpoint_flags
from megazero.cli.model_flags import add_layout_flags, add_tokenizer_flags
from megazero.cli.parser import command_parser, given_path, given_word

DESCRIPTION = """
Loss and perplexity of a model on documents, alone or under torchrun.

The checkpoint may have any format that `megazero convert` reads, and any layout. tp x pp processes share a model;
further processes are replicas, which divide the documents. Except for rounding, the result does not depend on the
layout or the batch size.

Each token is scored once. A document starts after a separator (--prefix-id, else the run's or tokenizer's
end-of-document token), from which its first token is predicted. Without a separator, or with --no-prefix, first tokens
are context only. Documents longer than the context are cut into windows, which score --stride tokens each. A smaller
stride gives each token more context, and takes longer.

The output has, for all documents together: mean loss in nats per token, its sum, perplexity, and bits per byte of text.
Status: 0, 2 for a mistake in arguments or files, 1 for anything else.
"""
EXAMPLES = (
    "megazero evaluate runs/bloom --data-path data/valid",
    "megazero evaluate runs/bloom --input notes.txt --document line --stride 512 --json",
    "torchrun --nproc-per-node 4 -m megazero evaluate hub/bloom-7b1 --tp 2 --pp 2 --input text/ --output scores.jsonl",
    "python tools/evaluate.py runs/bloom --input notes.txt",
)


def parser() -> argparse.ArgumentParser:
    flags = command_parser("evaluate", DESCRIPTION, EXAMPLES)
    add_checkpoint_flags(flags)
    text = flags.add_argument_group("documents, at least one of the two")
    text.add_argument(
        "--data-path", nargs="+", type=given_word, default=[], metavar="PREFIX", help="prefixes of .bin/.idx pairs"
    )
    text.add_argument(
        "--input",
        nargs="+",
        type=given_word,
        default=[],
        metavar="FILE",
        help="files and folders of jsonl or text, also .gz and .zst",
    )
    text.add_argument("--json-key", default="text", help="key of the text in a line of jsonl")
    text.add_argument(
        "--format",
        dest="text_format",
        default="auto",
        choices=("auto", "jsonl", "text"),
        help="of --input; auto: by ending",
    )
    text.add_argument("--document", default="file", choices=("file", "line"), help="what a document of plain text is")
    text.add_argument(
        "--encoding-errors",
        default="strict",
        choices=("strict", "replace"),
        help="bytes that are no UTF-8: stop, or U+FFFD",
    )
    text.add_argument(
        "--append-eod",
        action="store_true",
        help="end documents of --input with the end-of-document token, and score it",
    )
    add_tokenizer_flags(text)
    text.add_argument("--limit", type=int, metavar="N", help="score the first N documents only")
    how = flags.add_argument_group("scoring")
    how.add_argument(
        "--context", type=int, metavar="N", help="tokens that the model reads at once (default: its sequence length)"
    )
    how.add_argument(
        "--stride", type=int, metavar="N", help="tokens scored per window of a long document (default: the context)"
    )
    how.add_argument(
        "--prefix-id",
        type=int,
        metavar="ID",
        help="token that documents start after (default: the end-of-document token)",
    )
    how.add_argument(
        "--no-prefix", action="store_true", help="documents start after nothing: first tokens are not scored"
    )
    how.add_argument(
        "--micro-batch-size", type=int, default=8, metavar="N", help="windows of one forward pass (%(default)s)"
    )
    add_layout_flags(flags)
    out = flags.add_argument_group("output")
    out.add_argument(
        "--output",
        type=given_path,
        metavar="FILE.jsonl",
        help="one line per document, in their order; FILE.jsonl.unfinished until all are scored. An earlier result is "
        "replaced",
    )
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from megazero.cli.evaluation import run

    run(args)
