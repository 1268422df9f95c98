"""Train a byte-level BPE: python tools/train_tokenizer.py --input corpus/ --vocab-size 32000 --output TOKENIZER

Then: --tokenizer gpt2 --tokenizer-path TOKENIZER, with --chat: --tokenizer hf --tokenizer-path TOKENIZER
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.data.preprocess import texts
from megazero.data.progress import to_stderr
from megazero.data.tool import add_reader_flags, reader_of, run
from megazero.data.train_bpe import train_bpe


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a byte-level BPE on text; writes vocab.json and merges.txt, with --chat tokenizer.json."
    )
    add_reader_flags(parser)
    parser.add_argument("--vocab-size", type=int, default=32000, help="tokens, 256 bytes and the separator included")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="with tokens around the turns of a chat, and a chat template: for models that talk",
    )
    parser.add_argument("--output", required=True, help="folder for the files")
    args = parser.parse_args()
    train_bpe(
        texts(args.input, reader_of(args), to_stderr, "reading"),
        args.vocab_size,
        Path(args.output),
        to_stderr,
        chat=args.chat,
    )
    to_stderr(f"the tokenizer is in {args.output}")


if __name__ == "__main__":
    run(main)
