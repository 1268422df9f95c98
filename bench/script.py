"""What the scripts of this folder share: their flags, what they say while they measure, and the files they leave."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.field import TABLES, Table
from bench.harness import Plan

QUICK = "a tiny model: a smoke test"


def parser_of(doc: str | None, quick: str = QUICK) -> argparse.ArgumentParser:
    """The parser of a script with this docstring, and with --results and --quick, which does what `quick` says."""
    flags = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help=quick)
    flags.add_argument("--results", type=Path, default=results.RESULTS, help="folder of the results")
    return flags


def add_turns(flags: argparse.ArgumentParser, rounds: int, seconds: float = 1.5) -> None:
    """The flags of `plan_of`."""
    flags.add_argument("--rounds", type=int, default=rounds, help="turns of each side (%(default)s)")
    flags.add_argument("--seconds", type=float, default=seconds, help="of a turn, at least one step (%(default)s)")


def plan_of(args: argparse.Namespace) -> Plan:
    """How long to measure; with --quick one turn of one step."""
    return Plan(1, 0.0, 1) if args.quick else Plan(args.rounds, args.seconds)


def add_tables(flags: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """The flag of `tables_of`."""
    flags.add_argument("--tables", default=",".join(default), help="names, with commas: %(default)s")


def tables_of(args: argparse.Namespace) -> list[Table]:
    """The tables of `bench.field` that --tables names, with --quick tiny. Ends the program where a name is unknown."""
    known = {table.name: table for table in TABLES}
    names = args.tables.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--tables: no such table: {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name].tiny() if args.quick else known[name] for name in names]


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


def report(
    args: argparse.Namespace,
    kind: str,
    settings: dict[str, Any],
    numbers: dict[str, Any],
    text: str,
    path: Path | None = None,
) -> Path:
    """Write numbers as JSON (`results.write`, to --results) and text as Markdown beside it; return the JSON's path."""
    path = results.write(f"{kind}-quick" if args.quick else kind, settings, numbers, args.results, path)
    path.with_suffix(".md").write_text(text + "\n")
    return path
