"""Convert a checkpoint of any known format into any other; weights stay bit for bit what they are, unless --dtype asks
for others.

python tools/convert_checkpoint.py --input bloom-560m --to megazero --output runs/bloom --verify
python tools/convert_checkpoint.py --input runs/mine --to hf --output mine-hf --verify
python tools/convert_checkpoint.py --input runs/mine --to megatron-deepspeed --tp 4 --pp 12 --dp 8 --output mine-ds
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.cli.checkpoint_flags import add_checkpoint_flags, checkpoint_of, checkpoint_problems
from megazero.config.dtypes import PRECISION_OF, compute_dtype
from megazero.convert.changed import Trimmed
from megazero.convert.convert import convert
from megazero.convert.formats import Wanted
from megazero.convert.registry import format_table, open_source
from megazero.convert.source import ConversionError
from megazero.convert.verification import verify
from megazero.data.progress import to_stderr
from megazero.data.tool import run


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = format_table()
    add_checkpoint_flags(made, "--input")
    made.add_argument("--output", required=True, type=Path, metavar="DIR", help="a folder that is not there yet")
    made.add_argument(
        "--to",
        required=True,
        choices=tuple(name for name, format in known.items() if format.write),
        help="format to write",
    )
    made.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the target, where it has a layout")
    made.add_argument("--pp", type=int, default=1, help="pipeline stages of the target, where it has a layout")
    made.add_argument("--dp", type=int, default=1, help="data-parallel ranks that the target's optimizer files are for")
    made.add_argument(
        "--dtype",
        choices=tuple(PRECISION_OF.values()),
        help="of the model's weights; default: what the model computes in",
    )
    made.add_argument(
        "--vocab-size", type=int, metavar="V", help="leave out rows beyond these, the padding of another program"
    )
    made.add_argument(
        "--verify",
        action="store_true",
        help="compare every tensor afterwards, and the logits where the model fits in memory",
    )
    return made


def main() -> None:
    args = parser().parse_args()
    wanted = Wanted(args.tp, args.pp, args.dp, compute_dtype(args.dtype) if args.dtype else None)
    wrong = list(checkpoint_problems(args))
    if wrong:
        raise ConversionError("; ".join(wrong))
    with open_source(checkpoint_of(args), args.format) as opened:
        source = Trimmed(opened, args.vocab_size) if args.vocab_size is not None else opened
        convert(source, format_table()[args.to], args.output.expanduser(), wanted, to_stderr)
        print(f"{source.path} ({source.format}) -> {args.output} ({args.to})")
        print("\n".join(source.report.lines()))
        if not args.verify:
            return
        verdict = verify(source, args.output.expanduser(), args.to, to_stderr)
        print("\n".join(verdict.lines))
    if not verdict.holds:
        sys.exit(1)


if __name__ == "__main__":
    run(main, (ConversionError, OSError))
