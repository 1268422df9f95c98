"""`python -m tests.planted`: plant faults one by one, and say what catches each: its test, and `megazero verify-layout`
beside it. Status 1 if one of the two misses more than a fiftieth of those that it should see.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.planted.fault import Fault
from tests.planted.plant import SOUND_SECONDS, Copy
from tests.planted.proofs import layouts_of
from tests.planted.report import Judged, line_of, suffices, table_of, words_of
from tests.planted.table import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--row", type=int, nargs="*", help="rows of the list of faults; all without it")
    parser.add_argument("--area", nargs="*", help="rooms whose files are changed, such as zero; all without it")
    parser.add_argument("--name", help="a part of the faults' names; all without it")
    parser.add_argument("--judge", choices=("test", "proof", "both"), default="both", help="who is asked of each fault")
    parser.add_argument("--verbose", action="store_true", help="show what a judge prints that misses a fault")
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
    tests, proofs = args.judge != "proof", args.judge != "test"
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Copy(Path(folder))
        if not is_sound(copy, faults if tests else (), faults if proofs else ()):
            return 1
        judged = list[Judged]()
        for fault in faults:
            names = layouts_of(fault) if proofs else ()
            with copy.planted(fault):
                verdict = copy.test([fault.test]) if tests else None
                judged.append(Judged(fault, verdict, copy.prove(names) if names else None))
            print(line_of(judged[-1]), flush=True)
            if args.verbose:
                missed = (said for said in judged[-1][1:] if said is not None and said.judge is None)
                print(*(said.output for said in missed), sep="\n", flush=True)
    print(f"\n{table_of(judged)}\n\n{words_of(judged)}")
    return 0 if suffices(judged) else 1


def is_sound(copy: Copy, tested: Iterable[Fault], proven: Iterable[Fault]) -> bool:
    """Whether these faults' tests pass in the copy without a fault, and the layouts in which proofs look are equal."""
    if tests := [fault.test for fault in tested]:
        sound = copy.sound(tests)
        print(f"without a fault: {'passed' if sound.passed else 'FAILED'}, {sound.seconds:.0f} s", flush=True)
        if not sound.passed:
            print(sound.output)
            return False
    names = dict.fromkeys(name for fault in proven for name in layouts_of(fault))
    if not names:
        return True
    proof = copy.prove([*names], SOUND_SECONDS)
    equal = proof.layouts == (*names,) and not proof.told and not proof.refused
    print(f"without a fault: {len(names)} layouts {'equal' if equal else 'DIFFER'}, {proof.seconds:.0f} s", flush=True)
    if not equal:
        print(proof.output)
    return equal


if __name__ == "__main__":
    sys.exit(main())
