"""`megazero doctor`: its help; `examination` looks at the machine."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser

DESCRIPTION = """
Looks at this machine and installation: torch, processor, kernels, cards, backends, optional packages. A line that
begins with - says what is missing and what that costs, one with ! why megazero cannot run. Kernels that are built at
first use are built now.

Status: 0, or 1 where megazero cannot run.
"""
EXAMPLES = (
    "megazero doctor",
    "python -m megazero.doctor",
)


def main(argv: Sequence[str]) -> int:
    command_parser("doctor", DESCRIPTION, EXAMPLES).parse_args(argv)
    from megazero.cli.examination import run

    return status_of(run)
