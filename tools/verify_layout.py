"""The same as `megazero verify-layout`."""

import sys

try:
    from megazero.cli.main import main
except ModuleNotFoundError:  # no megazero is installed: that of this clone
    from clone import main

if __name__ == "__main__":
    sys.exit(main(["verify-layout", *sys.argv[1:]]))
