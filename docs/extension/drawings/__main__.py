"""A drawing on the standard output: `python -m docs.extension.drawings schedules > docs/pictures/schedules.svg`."""

from __future__ import annotations

import sys

from docs.extension.drawings import DRAWINGS, argument

if __name__ == "__main__":
    name, *given = sys.argv[1:]
    sys.stdout.write(DRAWINGS[name](**dict(argument(word) for word in given)))
