"""The same as `megazero prepare-data`."""

import sys

from megazero.cli.prepare_data import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
