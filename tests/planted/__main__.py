"""`python -m tests.planted`: plant faults one by one, and say what catches each. Status 1 if more than a fiftieth is
missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.planted.plant import Copy
from tests.planted.report import Judged, line_of, suffices, table_of, words_of
from tests.planted.table import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--row", type=int, nargs="*", help="rows of the list of faults; all without it")
    parser.add_argument("--area", nargs="*", help="rooms whose files are changed, such as zero; all without it")
    parser.add_argument("--name", help="a part of the faults' names; all without it")
    parser.add_argument("--verbose", action="store_true", help="show what pytest says where a fault is missed")
    args = parser.parse_args()
    if without := sorted({*(args.row or ())} - {fault.number for fault in FAULTS}):
        parser.error(f"--row: the table has no fault of row {', '.join(map(str, without))}")
    if without := sorted({*(args.area or ())} - {fault.area for fault in FAULTS}):
        parser.error(f"--area: the table has no fault of {', '.join(without)}")
    faults = [
        fault
        for fault in FAULTS
        if (not args.row or fault.number in args.row)
        and (not args.area or fault.area in args.area)
        and (args.name or "") in fault.name
    ]
    if not faults:
        parser.error("the table has no fault that --row, --area and --name describe together")
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Copy(Path(folder))
        sound = copy.sound(fault.test for fault in faults)
        print(f"without a fault: {'passed' if sound.passed else 'FAILED'}, {sound.seconds:.0f} s", flush=True)
        if not sound.passed:
            print(sound.output)
            return 1
        judged = list[Judged]()
        for fault in faults:
            with copy.planted(fault):
                judged.append(Judged(fault, copy.test([fault.test])))
            print(line_of(judged[-1]), flush=True)
            if judged[-1].verdict.judge is None and args.verbose:
                print(judged[-1].verdict.output, flush=True)
    print(f"\n{table_of(judged)}\n\n{words_of(judged)}")
    return 0 if suffices(judged) else 1


if __name__ == "__main__":
    sys.exit(main())
