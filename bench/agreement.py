"""Do megazero and its peers train the same model? Losses of some steps from the same weights on the same batches.

    python -m bench.agreement                    # the table ZeRO-3 of bench/peers.py, 12 steps
    python -m bench.agreement --tables ZeRO-1    # another table of several replicas and BLOOM's shape
    python -m bench.agreement --quick            # a tiny model

Each contestant's settings are those that are timed, but for the learning rate, which is higher so that wrong updates
show. The exit status is 1 if megazero cannot run or a loss differs by more than `LIMIT`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from typing import Any

from bench.entries import Table
from bench.harness import Contestant, Unavailable
from bench.script import add_tables, tables_of
from bench.workload import Entry, Workload

LR = 3e-3
LIMIT = 2e-3
"""Largest relative difference: of the first step, where only the rounding of products to bf16 differs, and of the
others, where the updates have added to it.
"""


def write_start(work: Workload, folder: str) -> None:
    """Write the weights that the peers begin with, as a folder of `transformers`."""
    from bench.contestants.transformers_ import model_of

    model: Any = model_of(work, "bloom", "eager")
    model.save_pretrained(folder)


def losses(work: Workload, entry: Entry, steps: int) -> list[float]:
    """The loss of each step: the mean over the replicas, all of which have as many tokens."""
    contestant = Contestant(work, entry)
    try:
        contestant.ask("load")
        contestant.ask("build")
        return [statistics.fmean(reply["loss"] for reply in contestant.ask("steps", count=1)) for _ in range(steps)]
    finally:
        contestant.stop()


def compare(table: Table, steps: int) -> bool:
    """Print a line for each contestant; whether all that ran agree with megazero."""
    print(f"{table.name}: {table.title}", flush=True)
    work, agrees = replace(table.work, lr=LR), True
    with tempfile.TemporaryDirectory() as start:
        write_start(work, start)
        entries = [
            replace(entry, module="megazero_same", settings=entry.settings | {"start": start})
            if entry.module == "megazero_"
            else entry
            for entry in (table.ours, *table.rivals)
        ]
        expected: list[float] = []
        for entry in entries:
            try:
                found = losses(work, entry, steps)
            except Unavailable as reason:
                print(f"  {entry.name}: cannot run: {reason}", flush=True)
                agrees &= entry is not entries[0]
                continue
            expected = expected or found
            worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
            agrees &= worst <= LIMIT
            shown = " ".join(f"{loss:.4f}" for loss in found)
            print(f"  {entry.name}: {shown}; differs by at most {worst:.1e}", flush=True)
    return agrees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tables(parser, ["ZeRO-3"])
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (%(default)s); batches repeat after 8")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a smoke test")
    args = parser.parse_args()
    agreed = [compare(table, args.steps) for table in tables_of(args)]
    sys.exit(0 if all(agreed) else 1)


if __name__ == "__main__":
    main()
