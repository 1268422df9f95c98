"""The same as `megazero merge-data`."""

import sys

from megazero.cli.merge_data import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
