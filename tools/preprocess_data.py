"""Turn text into a .bin/.idx pair for training.

python tools/preprocess_data.py --input corpus/ more.jsonl.zst --output-prefix data/mine --tokenizer gpt2
--tokenizer-path TOKENIZER --append-eod
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.data.preprocess import Job, preprocess
from megazero.data.progress import to_stderr
from megazero.data.tool import add_reader_flags, add_tokenizer_flags, cores, reader_of, run


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Text (jsonl or plain; .gz, .zst; folders) to PREFIX.bin and PREFIX.idx, or neither."
    )
    add_reader_flags(parser)
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    add_tokenizer_flags(parser, required=True)
    parser.add_argument("--append-eod", action="store_true", help="end each document with the tokenizer's separator")
    parser.add_argument("--workers", type=int, default=cores(), help="worker processes (default: all cores)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    args = parser.parse_args()
    job = Job(args.tokenizer, args.tokenizer_path, reader_of(args), args.append_eod)
    done = preprocess(
        args.input, args.output_prefix, job, workers=args.workers, report=to_stderr, overwrite=args.overwrite
    )
    print(f"{done.documents:,} documents, {done.tokens:,} tokens ({done.dtype}) in {done.bin_path} and {done.idx_path}")


if __name__ == "__main__":
    run(main)
