"""The same as `megazero export`."""

import sys

try:
    from megazero.cli.main import main
except ModuleNotFoundError:  # no megazero is installed: that of this clone
    from clone import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
