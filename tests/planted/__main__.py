"""`python -m tests.planted`: plant the table's faults one by one; status 1 if a test misses the one that it is for."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.planted.faults import FAULTS
from tests.planted.plant import Copy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--row", type=int, nargs="*", help="rows of the table; all without it")
    parser.add_argument("--verbose", action="store_true", help="show what pytest says where a fault is missed")
    args = parser.parse_args()
    if without := sorted({*(args.row or ())} - {fault.number for fault in FAULTS}):
        parser.error(f"--row: the table has no fault of row {', '.join(map(str, without))}")
    faults = [fault for fault in FAULTS if not args.row or fault.number in args.row]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Copy(Path(folder))
        sound = copy.test(list(dict.fromkeys(fault.test for fault in faults)))
        print(f"without a fault: {'passed' if sound.passed else 'FAILED'}, {sound.seconds:.0f} s", flush=True)
        if not sound.passed:
            print(sound.output)
            return 1
        missed, seconds = 0, sound.seconds
        for fault in faults:
            with copy.planted(fault):
                verdict = copy.test([fault.test])
            word = "caught" if verdict.caught else "MISSED"
            print(f"{fault.number:2} {fault.name:34} {word} {verdict.seconds:5.1f} s  {fault.test}", flush=True)
            if not verdict.caught and args.verbose:
                print(verdict.output, flush=True)
            missed, seconds = missed + (not verdict.caught), seconds + verdict.seconds
    print(f"{len(faults)} faults of {len({fault.number for fault in faults})} rows, {missed} missed, {seconds:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
