"""`megazero convert`: a checkpoint of any known format into any other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_path
from megazero.cli.shared_flags import PRECISIONS, add_checkpoint_flags, checkpoint_of, checkpoint_problems
from megazero.convert.names import QUANTIZED, TARGETS
from megazero.data.progress import to_stderr
from megazero.system.status import FAILED

DESCRIPTION = """
Convert a checkpoint of any known format into any other. Weights stay bit for bit what they are, unless --dtype asks for
others.
"""
EXAMPLES = (
    "megazero convert bloom-560m --to megazero --output runs/bloom --verify",
    "megazero convert runs/mine --to megatron-deepspeed --tp 4 --pp 12 --dp 8 --output mine-ds",
    "python tools/convert_checkpoint.py --input runs/mine --to hf --output mine-hf --verify",
)


def parser() -> argparse.ArgumentParser:
    flags = command_parser("convert", DESCRIPTION, EXAMPLES)
    add_checkpoint_flags(flags, "--input")
    add = flags.add_argument
    add("--output", required=True, type=given_path, metavar="DIR", help="a folder that is not there yet")
    add("--to", required=True, choices=TARGETS, help="format to write")
    add("--tp", type=int, default=1, help="tensor-parallel ranks of the target, where it has a layout")
    add("--pp", type=int, default=1, help="pipeline stages of the target, where it has a layout")
    add("--dp", type=int, default=1, help="data-parallel ranks that the target's optimizer files are for")
    add(
        "--dtype",
        choices=(*PRECISIONS, *QUANTIZED),
        help="of the model's weights; default: what the model computes in; q8_0: gguf only",
    )
    add("--without-tokenizer", action="store_true", help="hf: write a model whose tokenizer is not there any more")
    add("--vocab-size", type=int, metavar="V", help="leave out rows beyond these, the padding of another program")
    comparison = "compare every tensor afterwards, and the logits where the model fits in memory"
    add("--verify", action="store_true", help=comparison)
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from megazero.convert.source import ConversionError

    return status_of(lambda: run(args), (ConversionError,))


def run(args: argparse.Namespace) -> int:
    """Write the target, print what became of every key, and return the status. Raises ConversionError, OSError."""
    from megazero.config.dtypes import compute_dtype
    from megazero.convert.changed import Trimmed
    from megazero.convert.convert import convert
    from megazero.convert.formats import TargetOptions
    from megazero.convert.registry import format_table, open_source, target_table
    from megazero.convert.source import ConversionError
    from megazero.convert.verification import verify

    problems = list(checkpoint_problems(args))
    if args.verify and args.to not in format_table():
        problems.append(f"--verify: {args.to} is written and not read, so that there is nothing to compare with")
    if problems:
        raise ConversionError("; ".join(problems))
    quantized = args.dtype if args.dtype in QUANTIZED else None
    dtype = compute_dtype(args.dtype) if args.dtype and quantized is None else None
    options = TargetOptions(args.tp, args.pp, args.dp, dtype, quantized, args.without_tokenizer)
    output = args.output.expanduser()
    # The source stays open behind the conversion, because --verify reads every tensor again.
    with open_source(checkpoint_of(args), args.format) as opened:
        source = Trimmed(opened, args.vocab_size) if args.vocab_size is not None else opened
        convert(source, target_table()[args.to], output, options, to_stderr)
        print(f"{source.path} ({source.format}) -> {args.output} ({args.to})")
        print("\n".join(source.report.lines()))
        if not args.verify:
            return 0
        verdict = verify(source, output, args.to, to_stderr)
        print("\n".join(verdict.lines))
    return 0 if verdict.holds else FAILED
