"""The same as `megazero train-tokenizer`."""

import sys

from megazero.cli.train_tokenizer import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
