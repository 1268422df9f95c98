"""A training step in 16 bits beside the same step in fp32, in turns.

    python -m bench.precisions              # W1 and W2 of bench.peers
    python -m bench.precisions --quick      # a tiny model: does everything start?

On a processor without 16-bit products a step in 16 bits is to take at most 1.10 times as long as one in fp32, in less
memory. `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MEGAZERO_FUSED=avx2` in front makes a processor with more
instructions answer like such a one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, replace
from typing import Any

from bench import results
from bench.contestants.megazero_split import PARTS
from bench.entries import Table
from bench.harness import Contestant, Plan
from bench.script import add_tables, add_turns, parser_of, plan_of, report, say, tables_of
from bench.train import Turns, busiest

WIDE, NARROW = "fp32", ("bf16", "fp16")
HEADINGS = ("milliseconds", "step", "times fp32 (turns)", *PARTS, "tokens/s", "peak MiB", "of fp32's")


def compare(table: Table, plan: Plan) -> dict[str, dict[str, Any]]:
    """Precision -> what its turns gave, with the ratios to the turns of fp32 between them."""
    entry = replace(table.ours, module="megazero_split")
    works = {precision: replace(table.work, precision=precision) for precision in (WIDE, *NARROW)}
    sides = {precision: Turns(Contestant(work, entry)) for precision, work in works.items()}
    try:
        say(f"{table.name}: starting")
        for side in sides.values():
            side.contestant.prepare(plan.warm_up)
        for number in range(plan.rounds):
            took = {precision: side.one(plan) for precision, side in sides.items()}
            say(f"  turn {number + 1}/{plan.rounds}: " + ", ".join(f"{p} {s * 1e3:.0f} ms" for p, s in took.items()))
        measured = {precision: side.found(table) for precision, side in sides.items()}
    finally:
        for side in sides.values():
            side.contestant.stop()
    for values in measured.values():
        pairs = zip(values["seconds"], measured[WIDE]["seconds"], strict=True)
        values["ratios"] = [statistics.median(narrow) / statistics.median(wide) for narrow, wide in pairs]
        values["ratio"] = statistics.median(values["ratios"])
    return measured


def row(name: str, values: dict[str, Any], wide: dict[str, Any]) -> list[str]:
    parts = busiest(values["parts_by_rank"])
    peak = values["peak_mib_above_imports"]
    return [
        name,
        f"{values['median_seconds'] * 1e3:,.0f}",
        f"{values['ratio']:.2f} ({min(values['ratios']):.2f} to {max(values['ratios']):.2f})",
        *(f"{parts[part] * 1e3:,.0f}" for part in PARTS),
        f"{values['tokens_per_second']:,.0f}",
        f"{peak:,.0f}",
        f"{peak / wide['peak_mib_above_imports']:.2f}",
    ]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "a tiny model, one turn: a smoke test")
    add_tables(parser, ["W1", "W2"])
    add_turns(parser, 5)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    plan = plan_of(args)
    tables = tables_of(args)
    say(json.dumps(results.machine()))
    found = {table.name: compare(table, plan) for table in tables}
    rows = [
        row(f"{name}, {precision}", values, by_precision[WIDE])
        for name, by_precision in found.items()
        for precision, values in by_precision.items()
    ]
    text = results.table(HEADINGS, rows)
    path = report(args, "precisions", asdict(plan), {"tables": found}, text)
    say(f"\n{text}\n\n{path}")


if __name__ == "__main__":
    main()
