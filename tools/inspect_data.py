"""The same as `megazero inspect-data`."""

import sys

from megazero.cli.inspect_data import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
