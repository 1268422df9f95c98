"""The budgets of the CUDA kernels as a table of the documentation, beside what was measured on a card.

Before: the kernels as they were when an H100 was first measured, in results/2026-11-22-kernels-before.csv. Now: their
budgets, to which a test holds them. Measured: the first and the last file of results that has ops of such a card.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu_report import op_rows, share
from bench.kernel_budgets import BUDGETS, H100, Budget
from bench.results import RESULTS

BEFORE = RESULTS / "2026-11-22-kernels-before.csv"
HEADINGS = ("op", "part", "registers", "instructions a byte", "of the slots", "bytes under way", "estimate", "measured")


def kernel_table(folder: Path = RESULTS) -> list[tuple[str, ...]]:
    """A row for each kernel of an H100, below the headings. A cell is `before, now`, or now alone."""
    with BEFORE.open() as file:
        before = {(row["op"], row["dtype"], row["part"]): row for row in csv.DictReader(file)}
    first, last = _measured(folder)
    return [HEADINGS, *(_row(b, before.get((b.op, b.dtype, b.part)), first, last) for b in BUDGETS if "90" in b.limits)]


def _row(
    budget: Budget, before: dict[str, str] | None, first: dict[Any, float], last: dict[Any, float]
) -> tuple[str, ...]:
    now = budget.limits["90"]
    own = {**asdict(now), "in flight": now.in_flight}
    both: list[Mapping[str, Any]] = [own] if before is None else [before, own]
    pairs = (
        [f"{one['registers']}" for one in both],
        [f"{float(one['slots']):.1f}" for one in both],
        [f"{H100.slot_share(float(one['slots'])):.0%}" for one in both],
        [f"{one['in flight']}" for one in both],
        [f"{float(one['estimate']):.0%}" for one in both],
        [f"{found[budget.measured]:.0%}" if budget.measured in found else "" for found in (first, last)],
    )
    pairs[4][-1] += f" ({budget.excuse})" if budget.excuse else ""
    return f"{budget.op}, {budget.dtype}", budget.part, *(", ".join(filter(None, pair)) for pair in pairs)


def _measured(folder: Path) -> tuple[dict[Any, float], dict[Any, float]]:
    """Shares of the copy by (op, dtype, part), of the first and of the last results; none of the last where one file is
    all.
    """
    found = []
    for path in sorted(folder.glob("*-gpu.json")):
        results = json.loads(path.read_text())
        shares = {(row["name"], row["dtype"], row["part"]): share(row, results) for row in op_rows(results)}
        if H100.name in results["card"].get("card", "") and shares:
            found.append({key: value for key, value in shares.items() if value is not None})
    return (found[0] if found else {}), (found[-1] if len(found) > 1 else {})
