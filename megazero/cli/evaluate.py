"""`megazero evaluate`: loss and perplexity of a model on documents."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megazero.cli.parser import command_parser, given_path, given_word, not_positive
from megazero.cli.shared_flags import (
    add_checkpoint_flags,
    add_layout_flags,
    add_text_flags,
    add_tokenizer_flags,
    checkpoint_of,
    model_problems,
    no_tokenizer_message,
    reader_of,
    run_on_grid,
    tokenizer_named,
)
from megazero.config.source import ConfigError
from megazero.data.indexed import DataError
from megazero.data.progress import Progress, to_stderr
from megazero.system.words import counted
from megazero.system.writable import closed

if TYPE_CHECKING:
    from megazero.convert.loading import LoadedModel
    from megazero.data.tokenizer import Tokenizer
    from megazero.evaluation.documents import Document
    from megazero.evaluation.perplexity import Totals, Windowing
    from megazero.mpu.grid import ProcessGrid

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
FIRST_LINE_BYTES = 1 << 16
"""Bytes of a file's first line that show whether it is a result."""


def parser() -> argparse.ArgumentParser:
    flags = command_parser("evaluate", DESCRIPTION, EXAMPLES)
    add_checkpoint_flags(flags)
    text = flags.add_argument_group("documents, at least one of the two")
    add, pairs = text.add_argument, "prefixes of .bin/.idx pairs"
    add("--data-path", nargs="+", type=given_word, default=[], metavar="PREFIX", help=pairs)
    add_text_flags(text)
    separator = "end documents of --input with the end-of-document token, and score it"
    add("--append-eod", action="store_true", help=separator)
    add_tokenizer_flags(text, default=" (default: the checkpoint's own)")
    add("--limit", type=int, metavar="N", help="score the first N documents only")
    add = flags.add_argument_group("scoring").add_argument
    add("--context", type=int, metavar="N", help="tokens that the model reads at once (default: its sequence length)")
    add("--stride", type=int, metavar="N", help="tokens scored per window of a long document (default: the context)")
    prefix = "token that documents start after (default: the end-of-document token)"
    add("--prefix-id", type=int, metavar="ID", help=prefix)
    add("--no-prefix", action="store_true", help="documents start after nothing: first tokens are not scored")
    add("--micro-batch-size", type=int, default=8, metavar="N", help="windows of one forward pass (%(default)s)")
    add_layout_flags(flags)
    add = flags.add_argument_group("output").add_argument
    lines = "one line per document, in their order; FILE.jsonl.unfinished until all are scored"
    add("--output", type=given_path, metavar="FILE.jsonl", help=f"{lines}. An earlier result is replaced")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return flags


def main(argv: Sequence[str]) -> NoReturn:
    """Evaluate as this rank, and end its process."""
    run_on_grid(parser().parse_args(argv), check, evaluate)


def check(args: argparse.Namespace, world_size: int) -> None:
    """Raise one ConfigError with all problems of the flags."""
    problems = [*model_problems(args, world_size, replicas=True)]
    problems += not_positive(args, "micro_batch_size", "context", "stride", "limit")
    if not args.data_path and not args.input:
        problems.append("--data-path PREFIX or --input FILE: there is nothing to score")
    if args.no_prefix and args.prefix_id is not None:
        problems.append(f"--no-prefix and --prefix-id {args.prefix_id} exclude each other")
    if args.output is not None and (problem := output_problem(args.output)) is not None:
        problems.append(f"--output {args.output}: {problem}")
    if problems:
        raise ConfigError(problems)


def output_places(output: Path) -> tuple[Path, Path | None]:
    """(where the lines are written, where that file is moved in the end; None: it stays).

    Lines for a device or a pipe, such as /dev/stdout, are written there: moving a file to it would put an end to it.
    A link stays, and the file that it leads to is replaced.
    """
    if os.path.exists(output) and not os.path.isfile(output):
        return output, None
    finished = Path(os.path.realpath(output))
    return finished.with_name(f"{finished.name}.unfinished"), finished


def output_problem(output: Path) -> str | None:
    """Why the lines of --output cannot be written, as far as is known before hours of scoring; None if they can."""
    if not os.path.isdir(output.parent):
        return f"there is no folder {output.parent}"
    if os.path.isdir(output):
        return "is a folder; name a file in it"
    unfinished, finished = output_places(output)
    if finished is None:
        return None if os.access(unfinished, os.W_OK) else "may not be written"
    if not _may_be_replaced(finished):
        return "is a file of another kind, which is not replaced; name another file"
    # `closed` asks whether a folder can be made. If the file is there, its name fits, and its folder is asked for.
    place = unfinished.parent if os.path.lexists(unfinished) else unfinished
    if (reason := closed(str(place))) is not None:
        return reason
    if os.path.isdir(unfinished):
        return f"{unfinished}, where lines are written first, is a folder"
    denied = os.path.exists(unfinished) and not os.access(unfinished, os.W_OK)
    return f"{unfinished}, where lines are written first, may not be written" if denied else None


def _may_be_replaced(output: Path) -> bool:
    """Whether a file is an earlier result, or is not there."""
    try:
        with open(output, "rb") as file:
            first = file.readline(FIRST_LINE_BYTES)
        return not first or "total_loss" in json.loads(first)
    except OSError:  # there is no file, or none that can be read: `closed` says whether one can be written
        return True
    except (ValueError, TypeError):  # no JSON; JSON that has no members
        return False


def windowing_for(args: argparse.Namespace, loaded: LoadedModel, eod: int | None) -> Windowing:
    """How documents become windows. Raises one ConfigError with all problems of the flags."""
    from megazero.evaluation.perplexity import Windowing
    from megazero.evaluation.scorer import longest_context

    model, positions = loaded.run.model, longest_context(loaded.run.model)
    context = args.context or min(model.seq_length, positions or model.seq_length)
    stride = args.stride or context
    prefix = None if args.no_prefix else eod if args.prefix_id is None else args.prefix_id
    problems = []
    if positions is not None and context > positions:
        problems.append(f"--context {context}: the model has {positions} learned positions")
    if stride > context:
        problems.append(f"--stride {stride}: tokens would be left out; at most the context of {context}")
    assert model.vocab_size is not None
    if prefix is not None and not 0 <= prefix < model.vocab_size:
        problems.append(f"--prefix-id {prefix}: the model's vocabulary has {model.vocab_size} tokens")
    if problems:
        raise ConfigError(problems)
    return Windowing(context, stride, prefix)


def documents(
    args: argparse.Namespace, loaded: LoadedModel, tokenizer: Tokenizer | None, eod: int | None
) -> Iterator[Document]:
    """The documents of --data-path, then those of --input. Raises DataError."""
    from megazero.evaluation.documents import indexed_documents, text_documents

    for prefix in args.data_path:
        yield from indexed_documents(prefix)
    if args.input:
        if tokenizer is None:
            raise DataError(f"--input: {no_tokenizer_message(args, loaded)}")
        if args.append_eod and eod is None:
            raise DataError("--append-eod: neither the checkpoint nor the tokenizer has a token that ends a document")
        yield from text_documents(args.input, reader_of(args), tokenizer, eod if args.append_eod else None)


def evaluate(args: argparse.Namespace, grid: ProcessGrid) -> None:
    """Score the documents. A collective of all ranks; rank 0 prints and writes."""
    from megazero.convert.loading import open_model
    from megazero.data.tokenizer_record import require_tokenizer
    from megazero.evaluation.perplexity import Totals, score_documents
    from megazero.evaluation.scorer import Scorer

    loaded = open_model(checkpoint_of(args), grid, precision=args.precision, format=args.format)
    tokenizer = tokenizer_named(args, loaded)
    if tokenizer is not None:
        require_tokenizer(args.data_path, tokenizer, args.tokenizer or loaded.run.data.tokenizer)
    eod = loaded.end_of_document(tokenizer)
    windowing = windowing_for(args, loaded, eod)
    scorer = Scorer(loaded.run, loaded.stages, grid, args.micro_batch_size)
    totals, began = Totals(), time.perf_counter()
    progress = Progress(to_stderr, "scoring", float(args.limit or 0), "documents", every=10.0)
    unfinished, finished = (None, None) if args.output is None or grid.rank else output_places(args.output)
    limit = min(args.limit, sys.maxsize) if args.limit else None  # islice takes no number above
    with open(unfinished or os.devnull, "w", encoding="utf-8") as lines:
        for score in score_documents(scorer, islice(documents(args, loaded, tokenizer, eod), limit), windowing):
            totals.add(score)
            lines.write(json.dumps(score.record()) + "\n")
            if grid.rank == 0 and args.limit:  # without it the number of documents is not known in advance
                progress.reach(totals.documents)
    if totals.tokens == 0:
        raise DataError(nothing_scored(totals.documents))
    if unfinished is not None and finished is not None:
        unfinished.replace(finished)
    if grid.rank == 0:
        report(args, windowing, totals, time.perf_counter() - began)


def nothing_scored(documents: int) -> str:
    """Why there is no loss, for the number of documents that were read."""
    if documents == 0:
        return "nothing was scored: there are no documents in what was named"
    if documents == 1:
        return "nothing was scored: the document that was named has no token that another stands before"
    return f"nothing was scored: none of the {documents:,} documents named has a token that another stands before"


def report(args: argparse.Namespace, windowing: Windowing, totals: Totals, seconds: float) -> None:
    """Print the result as text, or with --json as one object."""
    record = totals.record(every_token=windowing.prefix is not None)
    rate = totals.tokens / seconds
    if args.json:
        layout = {"context": windowing.context, "stride": windowing.stride, "prefix_id": windowing.prefix}
        about = {"checkpoint": str(checkpoint_of(args)), **layout}
        print(json.dumps(about | record | {"seconds": seconds, "tokens_per_second": rate}), flush=True)
        return
    scored = f"{counted(totals.documents, 'document')}, {counted(totals.tokens, 'token')}"
    print(f"{scored} in {seconds:.1f} s ({rate:,.0f} tokens/s)")
    first = f"after token {windowing.prefix}" if windowing.prefix is not None else "first tokens not scored"
    print(f"context {windowing.context}, stride {windowing.stride}, {first}")
    units = {"loss": "nats per token", "perplexity": "", "bits_per_byte": "", "total_loss": "nats in all"}
    for name, unit in units.items():
        if record[name] is not None or name != "bits_per_byte":  # which a pair of token ids does not have
            value = "not finite" if record[name] is None else f"{record[name]:.6f}"
            print(f"{name.replace('_', ' '):<14} {value} {unit}".rstrip())
