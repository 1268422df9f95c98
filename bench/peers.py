"""megazero compared with its peers: same model, batch, precision and threads, in alternating turns on one machine.

    python -m bench.peers                       # every table
    python -m bench.peers --tables W1,ZeRO-1    # some
    python -m bench.peers --precision fp32      # for a CPU without 16-bit products; peers of several ranks have none
    python -m bench.peers --quick               # a tiny model: does everything start?

Results go to bench/results/ (JSON with every sample, a Markdown table, a plot).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench import results
from bench.entries import Table
from bench.field import TABLES
from bench.harness import Contestant, Match, Plan, Unavailable, play
from bench.script import add_tables, add_turns, parser_of, plan_of, report, say, tables_of
from bench.workload import Entry


@dataclass
class Row:
    """A rival's result; match None: it was skipped, `reason` says why."""

    rival: Entry
    match: Match | None
    reason: str = ""


def run_table(table: Table, plan: Plan) -> list[Row]:
    """Compare ours with every rival of the table, one at a time, so that at most two contestants take memory."""
    say(f"\n{table.name}: {table.title}")
    ours = Contestant(table.work, table.ours)
    rows = []
    try:
        say(f"  {table.ours.name}: starting")
        ours.prepare(plan.warm_up)
        rows = [Row(rival, *_meet(ours, rival, plan)) for rival in table.rivals]
    except Unavailable as reason:
        say(f"  {table.ours.name} cannot run: {reason}")
        rows = [Row(rival, None, f"{table.ours.name}: {reason}") for rival in table.rivals]
    finally:
        ours.stop()
    return rows


def _meet(ours: Contestant, rival: Entry, plan: Plan) -> tuple[Match | None, str]:
    began = time.perf_counter()
    theirs = Contestant(ours.work, rival)
    try:
        say(f"  {rival.name}: starting")
        theirs.prepare(plan.warm_up)
        match = play(ours, theirs, plan, say)
        say(f"    {match.ratio:.2f} times its speed; took {time.perf_counter() - began:.0f} s")
        return match, ""
    except Unavailable as reason:
        say(f"    skipped: {reason}")
        return None, str(reason)
    finally:
        theirs.stop()


HEADINGS = (
    "against",
    "ms a step",
    "tokens/s",
    "memory MiB",
    "megazero ms",
    "tokens/s",
    "memory MiB",
    "times faster",
    "of its memory",
)


def cells(row: Row) -> list[str]:
    """The row of the printed table; memory is that above the imports, of the rank with the largest."""
    match = row.match
    if match is None:
        return [row.rival.name, "skipped", *[""] * (len(HEADINGS) - 2)]
    sides = []
    for samples, tokens, memory in zip((match.theirs, match.ours), match.tokens[::-1], match.memory[::-1], strict=True):
        sides += [f"{samples.median * 1e3:,.0f}", f"{tokens / samples.median:,.0f}", f"{memory:,.0f}"]
    return [row.rival.name, *sides, f"{match.ratio:.2f}", f"{match.memory[0] / match.memory[1]:.0%}"]


def as_text(found: dict[Table, list[Row]]) -> str:
    parts = []
    for table, rows in found.items():
        notes = [f"* {entry.name}: {entry.note}" for entry in (table.ours, *(row.rival for row in rows)) if entry.note]
        notes += [f"* {row.rival.name} skipped: {row.reason.splitlines()[0]}" for row in rows if row.match is None]
        parts.append(
            f"{table.name}: {table.title}\n\n"
            + results.table(HEADINGS, [cells(row) for row in rows])
            + "\n\n"
            + "\n".join(notes)
        )
    return "\n\n".join(parts)


def as_json(found: dict[Table, list[Row]]) -> dict[str, Any]:
    """Every sample in seconds, by turn, and the figures derived from them."""
    tables = {}
    for table, rows in found.items():
        entries = []
        for row in rows:
            entry: dict[str, Any] = {"rival": asdict(row.rival)}
            match = row.match
            if match is None:
                entry["skipped"] = row.reason
            else:
                entry |= {
                    "seconds": {"megazero": match.ours.turns, "rival": match.theirs.turns},
                    "median_seconds": {"megazero": match.ours.median, "rival": match.theirs.median},
                    "tokens_per_step": dict(zip(("megazero", "rival"), match.tokens, strict=True)),
                    "peak_mib_above_imports": dict(zip(("megazero", "rival"), match.memory, strict=True)),
                    "ratios": match.ratios,
                    "ratio": match.ratio,
                    "versions": match.versions,
                }
            entries.append(entry)
        tables[table.name] = {
            "title": table.title,
            "workload": asdict(table.work),
            "megazero": asdict(table.ours),
            "rivals": entries,
        }
    return {"tables": tables}


def bars(found: dict[Table, list[Row]]) -> dict[str, list[tuple[str, float]]]:
    """Tokens per second for the plot: megazero's median over all its turns, then every rival's."""
    groups = {}
    for table, rows in found.items():
        played = [(row.rival.name, row.match) for row in rows if row.match is not None]
        if not played:
            continue
        mine = sorted(match.tokens[0] / seconds for _, match in played for seconds in match.ours.all)
        theirs = [(name, match.tokens[1] / match.theirs.median) for name, match in played]
        groups[f"{table.name}: {table.title}"] = [(table.ours.name, mine[len(mine) // 2]), *theirs]
    return groups


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "a tiny model, one round, no compilation: a smoke test")
    add_tables(parser, [table.name for table in TABLES])
    parser.add_argument("--only", default="", help="rivals whose name contains this")
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of products; fp32 is for CPUs without 16-bit products, where torch's are slow (%(default)s)",
    )
    add_turns(parser, 4)
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[Table]:
    tables = [
        replace(table, rivals=tuple(rival for rival in table.rivals if args.only in rival.name))
        for table in tables_of(args)
    ]
    return [table.in_precision(args.precision) for table in tables if table.rivals]


def main() -> None:
    args = arguments()
    plan = plan_of(args)
    say(json.dumps(results.machine()))
    found = {table: run_table(table, plan) for table in chosen(args)}
    text = as_text(found)
    path = report(args, "peers", asdict(plan), as_json(found), text)
    results.plot(
        path.with_suffix(".png"),
        "megazero and its peers on one machine",
        "tokens per second",
        bars(found),
        first="tab:blue",
    )
    say(f"\n{text}\n\n{path}")


if __name__ == "__main__":
    main()
