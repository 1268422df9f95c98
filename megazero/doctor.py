"""`python -m megazero.doctor`: the same as `megazero doctor`."""

import sys

from megazero.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
