"""The same as `megazero evaluate`."""

import sys

from megazero.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
