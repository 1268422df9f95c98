"""The same as `megazero convert`."""

import sys

from megazero.cli.convert import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
