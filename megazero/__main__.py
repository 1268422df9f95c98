"""`python -m megazero`, and under torchrun `torchrun ... -m megazero`: the command `megazero`."""

import sys

from megazero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
