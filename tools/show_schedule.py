"""The same as `megazero plan-schedule`."""

import sys

from megazero.cli.plan_schedule import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
