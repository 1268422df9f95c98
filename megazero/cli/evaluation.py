"""What `megazero evaluate` does."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NoReturn

from megazero.cli.checkpoint_flags import checkpoint_of, checkpoint_problems
from megazero.cli.exit_status import end_rank
from megazero.cli.model_flags import not_positive, parallel_of, problems, tokenizer_named, ways_to_name_one
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.convert.loading import LoadedModel, open_model
from megazero.convert.source import ConversionError
from megazero.convert.tokenizers import no_tokenizer
from megazero.data.indexed import DataError
from megazero.data.input_files import ReaderOptions
from megazero.data.progress import Progress, to_stderr
from megazero.data.tokenizer import Tokenizer
from megazero.data.tokenizer_record import require_tokenizer
from megazero.evaluation.documents import Document, indexed_documents, text_documents
from megazero.evaluation.perplexity import Totals, Windowing, score_documents
from megazero.evaluation.scorer import Scorer, longest_context
from megazero.launch import Environment, launch
from megazero.mpu.grid import ProcessGrid
from megazero.system.words import counted
from megazero.system.writable import closed

LINE = 1 << 16
"""Bytes of a file's first line that show whether it is a result."""


def check(args: argparse.Namespace, world_size: int) -> None:
    """Raise one ConfigError with all problems of the flags."""
    wrong = [*checkpoint_problems(args), *problems(args, world_size, replicas=True)]
    wrong += not_positive(args, "micro_batch_size", "context", "stride", "limit")
    if not args.data_path and not args.input:
        wrong.append("--data-path PREFIX or --input FILE: there is nothing to score")
    if args.no_prefix and args.prefix_id is not None:
        wrong.append(f"--no-prefix and --prefix-id {args.prefix_id} exclude each other")
    if args.output is not None:
        wrong += output_problems(args.output)
    if wrong:
        raise ConfigError(wrong)


def output_problems(output: Path) -> Iterator[str]:
    """Why the lines of --output cannot be written, as far as is known before hours of scoring."""
    written, finished = output_places(output)
    if not os.path.isdir(output.parent):
        yield f"--output {output}: there is no folder {output.parent}"
    elif os.path.isdir(output):
        yield f"--output {output}: is a folder; name a file in it"
    elif finished is None and not os.access(written, os.W_OK):
        yield f"--output {output}: may not be written"
    elif finished is not None and (
        wrong := _other_file(finished)
        or closed(str(written.parent if os.path.lexists(written) else written))
        or _occupied(written)
    ):
        yield f"--output {output}: {wrong}"


def _other_file(output: Path) -> str | None:
    """What a file is that the lines would replace and that is no earlier result; None if there is none."""
    try:
        with open(output, "rb") as file:
            first = file.readline(LINE)
        known = not first or "total_loss" in json.loads(first)
    except OSError:  # there is none; why another one cannot be written is told elsewhere
        return None
    except (ValueError, TypeError):  # no JSON; JSON that holds nothing
        known = False
    return None if known else "is a file of another kind, which is not replaced; name another file"


def _occupied(unfinished: Path) -> str | None:
    """Why a file that a run before may have left cannot be written anew; None if it can."""
    if os.path.isdir(unfinished):
        return f"{unfinished}, where lines are written first, is a folder"
    denied = os.path.exists(unfinished) and not os.access(unfinished, os.W_OK)
    return f"{unfinished}, where lines are written first, may not be written" if denied else None


def windowing_for(args: argparse.Namespace, loaded: LoadedModel, eod: int | None) -> Windowing:
    """How documents become windows. Raises one ConfigError with all problems of the flags."""
    model, most = loaded.run.model, longest_context(loaded.run.model)
    context = args.context or min(model.seq_length, most or model.seq_length)
    stride = args.stride or context
    prefix = None if args.no_prefix else eod if args.prefix_id is None else args.prefix_id
    wrong = []
    if most is not None and context > most:
        wrong.append(f"--context {context}: the model has {most} learned positions")
    if stride > context:
        wrong.append(f"--stride {stride}: tokens would be left out; at most the context of {context}")
    assert model.vocab_size is not None
    if prefix is not None and not 0 <= prefix < model.vocab_size:
        wrong.append(f"--prefix-id {prefix}: the model's vocabulary has {model.vocab_size} tokens")
    if wrong:
        raise ConfigError(wrong)
    return Windowing(context, stride, prefix)


def documents(
    args: argparse.Namespace, loaded: LoadedModel, tokenizer: Tokenizer | None, eod: int | None
) -> Iterator[Document]:
    """The documents of --data-path, then those of --input. Raises DataError."""
    for prefix in args.data_path:
        yield from indexed_documents(prefix)
    if args.input:
        if tokenizer is None:
            raise DataError(
                f"--input: {checkpoint_of(args)} {no_tokenizer(loaded.report)}; name one by {ways_to_name_one(loaded)}"
            )
        if args.append_eod and eod is None:
            raise DataError("--append-eod: neither the checkpoint nor the tokenizer has a token that ends a document")
        reader = ReaderOptions(args.json_key, args.text_format, args.document, args.encoding_errors)
        yield from text_documents(args.input, reader, tokenizer, eod if args.append_eod else None)


def evaluate(args: argparse.Namespace, grid: ProcessGrid) -> None:
    """Score the documents. A collective of all ranks; rank 0 prints and writes."""
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
    with ExitStack() as stack:
        lines: IO[str] | None = stack.enter_context(open(unfinished, "w", encoding="utf-8")) if unfinished else None
        chosen = (
            document
            for _, document in zip(
                range(args.limit or sys.maxsize), documents(args, loaded, tokenizer, eod), strict=False
            )
        )
        for score in score_documents(scorer, chosen, windowing):
            totals.add(score)
            if lines is not None:
                lines.write(json.dumps(score.record()) + "\n")
            if grid.rank == 0 and args.limit:
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
    which = "the document that was named has" if documents == 1 else f"none of the {documents:,} documents named has"
    return f"nothing was scored: {which} {'no' if documents == 1 else 'a'} token that another stands before"


def output_places(output: Path) -> tuple[Path, Path | None]:
    """(where the lines are written, where that file is moved in the end; None: it stays).

    Lines for a device or a pipe, such as /dev/stdout, are written there: moving a file to it would put an end to it.
    A link stays, and the file that it leads to is replaced.
    """
    if os.path.exists(output) and not os.path.isfile(output):
        return output, None
    finished = Path(os.path.realpath(output))
    return finished.with_name(f"{finished.name}.unfinished"), finished


def report(args: argparse.Namespace, windowing: Windowing, totals: Totals, seconds: float) -> None:
    record = totals.record(every_token=windowing.prefix is not None)
    about = {
        "checkpoint": str(checkpoint_of(args)),
        "context": windowing.context,
        "stride": windowing.stride,
        "prefix_id": windowing.prefix,
    }
    if args.json:
        print(
            json.dumps(about | record | {"seconds": seconds, "tokens_per_second": totals.tokens / seconds}), flush=True
        )
        return
    shown = {"loss": "nats per token", "perplexity": "", "bits_per_byte": "", "total_loss": "nats in all"}
    print(
        f"{counted(totals.documents, 'document')}, {counted(totals.tokens, 'token')} in {seconds:.1f} s "
        f"({totals.tokens / seconds:,.0f} "
        "tokens/s)"
    )
    print(
        f"context {windowing.context}, stride {windowing.stride}, "
        + (f"after token {windowing.prefix}" if windowing.prefix is not None else "first tokens not scored")
    )
    for name, unit in shown.items():
        if record[name] is not None or name != "bits_per_byte":
            value = "not finite" if record[name] is None else f"{record[name]:.6f}"
            print(f"{name.replace('_', ' '):<14} {value} {unit}".rstrip())


def run(args: argparse.Namespace) -> NoReturn:
    """Evaluate as this rank, and end its process."""

    def work(here: Environment) -> None:
        check(args, here.world_size)
        with launch(Run(parallel=parallel_of(args)), here) as grid:
            evaluate(args, grid)

    end_rank(work, (ConversionError, DataError))
