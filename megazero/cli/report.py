"""`megazero report`: a run on one page of HTML, or several runs beside each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_path

DESCRIPTION = """
A run on one page of HTML, which needs no network and no server: loss, learning rate, gradient norm, throughput,
evaluations, what happened (saves, skipped steps, resumes), and the configuration. Several runs are drawn over each
other, with what differs in their configurations. The run may be going on; the page shows what is written so far.

RUN is the folder of --save, a folder around it, or the file of --metrics-file. Prints the path of the page.

Status: 0; 2 for a mistake in the arguments or the files; 1 where the page cannot be written.
"""
EXAMPLES = (
    "megazero report runs/mine",
    "megazero report runs/a runs/b runs/c/metrics.jsonl --output compared.html",
    "python tools/report.py runs/stdlib-20260101-120000",
)
NAME = "report.html"


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("report", DESCRIPTION, EXAMPLES)
    parser.add_argument("runs", type=given_path, nargs="+", metavar="RUN", help="a run's folder or metrics file")
    place = f"where the page goes (default: {NAME} beside the metrics of the first RUN). An earlier page is replaced"
    parser.add_argument("--output", type=given_path, metavar="FILE.html", help=place)
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    from megazero.report.metrics_lines import UnreadableRun

    return status_of(lambda: write(args.runs, args.output), (UnreadableRun, FileExistsError))


def write(paths: Sequence[Path], output: Path | None) -> None:
    """Write the page and print its path. Raises UnreadableRun, FileExistsError for another file, and OSError."""
    from megazero.report.page.document import require_place, write_page
    from megazero.report.run_folder import read_runs
    from megazero.report.run_page import run_page

    runs = read_runs(paths)
    output = output or runs[0].metrics.path.parent / NAME
    require_place(output, "--output")  # before the page is made, which takes seconds of long runs
    write_page(output, "--output", run_page(runs, datetime.now(timezone.utc)))
    print(output)
