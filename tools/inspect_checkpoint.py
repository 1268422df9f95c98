"""The same as `megazero inspect`."""

import sys

from megazero.cli.inspect import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
