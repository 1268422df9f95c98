"""What `megazero convert` does."""

from __future__ import annotations

import argparse

from megazero.cli.checkpoint_flags import checkpoint_of, checkpoint_problems
from megazero.config.dtypes import compute_dtype
from megazero.convert.changed import Trimmed
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source
from megazero.convert.source import ConversionError
from megazero.convert.verification import verify
from megazero.data.progress import to_stderr
from megazero.system.status import FAILED

MISTAKES = (ConversionError,)


def run(args: argparse.Namespace) -> int:
    """Write the target, print what became of every key, and return the status. Raises ConversionError, OSError."""
    options = TargetOptions(
        args.tp, args.pp, args.dp, compute_dtype(args.dtype) if args.dtype else None, args.without_tokenizer
    )
    wrong = list(checkpoint_problems(args))
    if wrong:
        raise ConversionError("; ".join(wrong))
    with open_source(checkpoint_of(args), args.format) as opened:
        source = Trimmed(opened, args.vocab_size) if args.vocab_size is not None else opened
        convert(source, format_table()[args.to], args.output.expanduser(), options, to_stderr)
        print(f"{source.path} ({source.format}) -> {args.output} ({args.to})")
        print("\n".join(source.report.lines()))
        if not args.verify:
            return 0
        verdict = verify(source, args.output.expanduser(), args.to, to_stderr)
        print("\n".join(verdict.lines))
    return 0 if verdict.holds else FAILED
