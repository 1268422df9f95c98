"""The same as `megazero draw-schedule`."""

import sys

from megazero.cli.draw_schedule import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
