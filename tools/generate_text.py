"""The same as `megazero generate`."""

import sys

from megazero.cli.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
