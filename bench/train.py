"""The time of the parts of a training step of megazero, in one process and on every two-rank layout.

    python -m bench.train                     # every layout
    python -m bench.train --tables W1,tp      # some
    python -m bench.train --before ../old     # in turns with another checkout: the gain of a change, by layout
    python -m bench.train --quick             # a tiny model: does everything start?

Time is the median over turns of a rank's mean step. Of several ranks it is that of the rank that spends most time
outside communication.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import results
from bench.contestants.megazero_split import PARTS
from bench.entries import Table
from bench.field import TABLES
from bench.harness import ROOT, Contestant, Plan, Unavailable
from bench.script import add_tables, add_turns, parser_of, plan_of, report, say, tables_of


@dataclass
class Turns:
    """The turns of one checkout: seconds of each step by turn, and its own report after each turn."""

    contestant: Contestant
    seconds: list[list[float]] = field(default_factory=list)
    reports: list[list[dict[str, Any]]] = field(default_factory=list)

    def one(self, plan: Plan) -> float:
        """Take a turn; return its median step in seconds."""
        self.contestant.ask("report")  # discards the time that a rank waited since its last turn
        self.seconds.append(self.contestant.turn(plan.seconds))
        self.reports.append(self.contestant.ask("report"))
        return statistics.median(self.seconds[-1])

    def found(self, table: Table) -> dict[str, Any]:
        """The time of each part by turn and rank, tokens/s and memory."""
        ranks = [[report[rank]["parts"] for report in self.reports] for rank in range(table.work.ranks)]
        steps = len(self.seconds[0])
        parts = [{part: statistics.median(turn[part] for turn in turns) / steps for part in PARTS} for turns in ranks]
        median = statistics.median(s for turn in self.seconds for s in turn)
        return {
            "commit": results.commit(self.contestant.root),
            "seconds": self.seconds,
            "median_seconds": median,
            "tokens_per_second": table.ours.tokens(table.work) / median,
            "parts_by_rank": parts,
            "peak_mib_above_imports": self.contestant.memory(),
            "state_mib": sum(self.reports[-1][0]["state_bytes"].values()) / 2**20,
        }


def split(table: Table, plan: Plan, before: Path | None) -> dict[str, Any]:
    """The result; with `before` also that of the other checkout, and the ratio of its time to ours. {"skipped": why} if
    it does not run.
    """
    entry = replace(table.ours, module="megazero_split")
    roots = [ROOT, *([before] if before else [])]
    sides = [Turns(Contestant(table.work, entry, root=root)) for root in roots]
    try:
        say(f"{table.name}: starting")
        for side in sides:
            side.contestant.prepare(plan.warm_up)
        for number in range(plan.rounds):
            took = [side.one(plan) for side in sides]
            say(
                f"  turn {number + 1}/{plan.rounds}: " + ", before ".join(f"{seconds * 1e3:.0f} ms" for seconds in took)
            )
        ours, *others = (side.found(table) for side in sides)
        for other in others:
            pairs = zip(ours["seconds"], other["seconds"], strict=True)
            ratios = [statistics.median(theirs) / statistics.median(own) for own, theirs in pairs]
            ours |= {"before": other, "ratios": ratios, "ratio": statistics.median(ratios)}
        return ours
    except Unavailable as reason:
        say(f"  skipped: {reason}")
        return {"skipped": str(reason)}
    finally:
        for side in sides:
            side.contestant.stop()


def busiest(parts: list[dict[str, float]]) -> dict[str, float]:
    """The parts of the rank that computes most."""
    return max(parts, key=lambda rank: sum(rank.values()) - rank["communication"])


def row(name: str, found: dict[str, Any], compared: bool) -> list[str]:
    if "skipped" in found:
        return [name, "skipped", *[""] * (len(PARTS) + 3 + compared)]
    parts = busiest(found["parts_by_rank"])
    shown = [f"{parts[part] * 1e3:,.0f}" for part in PARTS]
    memory = (f"{found['peak_mib_above_imports']:,.0f}", f"{found['state_mib']:,.0f}")
    cells = [name, f"{found['median_seconds'] * 1e3:,.0f}", *shown, f"{found['tokens_per_second']:,.0f}", *memory]
    return cells + (
        [f"{found['ratio']:.2f} ({min(found['ratios']):.2f} to {max(found['ratios']):.2f})"] if compared else []
    )


HEADINGS = ("milliseconds", "step", *PARTS, "tokens/s", "peak MiB", "of it state")
COMPARED = "times as fast as before (turns)"


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "a tiny model, one turn: a smoke test")
    add_tables(parser, [table.name for table in TABLES])
    add_turns(parser, 3)
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout with its kernels compiled, which takes turns with this one",
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    plan = plan_of(args)
    tables = tables_of(args)
    say(json.dumps(results.machine()))
    before = args.before.resolve() if args.before else None
    found = {table.name: split(table, plan, before) for table in tables}
    compared = before is not None
    headings = (*HEADINGS, COMPARED) if compared else HEADINGS
    text = results.table(headings, [row(name, values, compared) for name, values in found.items()])
    settings = asdict(plan) | {
        "layouts": {table.name: {"work": asdict(table.work), "entry": asdict(table.ours)} for table in tables}
    }
    path = report(args, "train", settings, {"layouts": found}, text)
    bars = {
        f"{name}: {values['tokens_per_second']:,.0f} tokens/s": [
            (part, busiest(values["parts_by_rank"])[part] * 1e3) for part in PARTS
        ]
        for name, values in found.items()
        if "skipped" not in values
    }
    results.plot(path.with_suffix(".png"), "A training step of megazero by parts", "milliseconds", bars)
    say(f"\n{text}\n\n{path}")


if __name__ == "__main__":
    main()
