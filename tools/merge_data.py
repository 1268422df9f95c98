"""Join several .bin/.idx pairs into one: python tools/merge_data.py --input PREFIX PREFIX ... --output-prefix PREFIX"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.data.tool import run
from megazero.data.writer import merge


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Join pairs in the order given; the widest dtype wins. Whole or not at all."
    )
    parser.add_argument("--input", nargs="+", required=True, help="prefixes of .bin/.idx pairs")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    args = parser.parse_args()
    done = merge(args.input, args.output_prefix, overwrite=args.overwrite)
    print(f"{done.documents:,} documents, {done.tokens:,} tokens ({done.dtype}) in {done.bin_path} and {done.idx_path}")


if __name__ == "__main__":
    run(main)
