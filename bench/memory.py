"""An account of the memory of a training step of megazero: every MiB of the peak that `bench/peers.py` compares.

    python -m bench.memory                     # W1 and W2
    python -m bench.memory --tables ZeRO-1,tp  # other tables of peers.py; the rank that holds most
    python -m bench.memory --quick             # a tiny model: does it start?

Memory is the resident set above that after the imports. The allocations of a step are listed by function, at the moment
of their peak. Needs Linux and glibc.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from bench import results
from bench.entries import Table
from bench.harness import Contestant
from bench.script import add_tables, parser_of, report, tables_of

STEPS = 5
"""Steps before the account, since the layout of the heap changes in the first steps."""


def account(table: Table) -> dict[str, Any]:
    """The peak above the imports and the account of `megazero_memory`, in MiB, of the rank with the largest peak."""
    contestant = Contestant(table.work, replace(table.ours, module="megazero_memory"))
    try:
        contestant.prepare(STEPS)
        contestant.steps(2)
        peaks = [reply["peak"] for reply in contestant.ask("memory")]
        reports = contestant.ask("report")
    finally:
        contestant.stop()
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    return {"rank": rank, "peak_mib_above_imports": peaks[rank], **reports[rank]}


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Rows: the parts, the tensors of the step by function, and the peak that was measured from outside."""
    peak, listed = found["peak_mib_above_imports"], []
    for part, size in found["parts"].items():
        listed.append([part, f"{size:,.1f}", f"{size / peak:.1%}"])
        if part.startswith("tensors of a step"):
            listed += [
                [f"... {function}", f"{mib:,.1f}", f"{mib / peak:.1%}"]
                for function, mib in found["tensors"].items()
                if mib >= 0.005 * peak
            ]
    total = sum(found["parts"].values())
    return [*listed, ["all of these", f"{total:,.1f}", f"{total / peak:.1%}"], ["the peak", f"{peak:,.1f}", "100.0%"]]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_tables(parser, ["W1", "W2"])
    return parser.parse_args()


def main() -> None:
    args = arguments()
    tables = tables_of(args)
    found = {table.name: account(table) for table in tables}
    settings = {table.name: {"work": asdict(table.work), "entry": asdict(table.ours)} for table in tables}
    text = "\n\n".join(
        f"{name}\n\n{results.table(('what', 'MiB', 'of the peak'), rows(values))}" for name, values in found.items()
    )
    path = report(args, "memory", settings, {"layouts": found}, text)
    print(text, json.dumps(results.machine()), path, sep="\n\n")


if __name__ == "__main__":
    main()
