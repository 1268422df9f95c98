"""The output of a benchmark: a JSON file with machine and versions, a table, a plot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_fp16",
)
PACKAGES = ("torch", "transformers", "deepspeed", "numpy", "matplotlib")


LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MEGAZERO_FUSED")
"""Environment variables with which a processor answers like one that has fewer instructions."""


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, the instruction sets that matter here, and limits on them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", facts.get("Features", "")).split()
    return {
        "processor": facts.get("model name", platform.processor() or "unknown"),
        "family": " ".join(facts.get(key, "?") for key in ("vendor_id", "cpu family", "model", "stepping")),
        "cores": len(cores()),
        "cache": facts.get("cache size", "unknown"),
        "memory_gib": round(_total_memory() / 2**30, 1),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "limited_by": {name: os.environ[name] for name in LIMITS if name in os.environ},
    }


def cores() -> set[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _total_memory() -> int:
    path = Path("/proc/meminfo")
    return int(path.read_text().split("MemTotal:")[1].split()[0]) * 1024 if path.exists() else 0


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that take part; a missing one is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"commit": commit(RESULTS.parent)}


def commit(folder: Path) -> str:
    """The commit of a checkout."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def write(kind: str, settings: dict[str, Any], found: dict[str, Any], folder: Path, path: Path | None = None) -> Path:
    """Write DATE-KIND.json under `folder`, or overwrite `path`, which an earlier call returned; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(timezone.utc)
    path = path or folder / f"{now:%Y-%m-%d-%H%M%S}-{kind}.json"
    whole = {
        "kind": kind,
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
    }
    path.write_text(json.dumps(whole | found, indent=1) + "\n")
    return path


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first is left-aligned, the others right-aligned."""
    widths = [max(len(line[i]) for line in [headings, *rows]) for i in range(len(headings))]

    def show(cells: Sequence[str]) -> str:
        shown = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(shown) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([show(headings), rule, *(show(row) for row in rows)])


def plot(
    path: Path, title: str, unit: str, groups: dict[str, list[tuple[str, float]]], *, first: str = "tab:gray"
) -> bool:
    """Draw horizontal bars, one panel for each group of (name, value); the first bar has a colour of its own.

    Returns False without matplotlib.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install matplotlib (or megazero[bench])", file=sys.stderr)
        return False
    heights = [len(bars) for bars in groups.values()]
    size = (9, 0.34 * sum(heights) + 0.75 * len(groups) + 0.4)
    figure, panels = pyplot.subplots(
        len(groups), 1, figsize=size, squeeze=False, height_ratios=heights, layout="constrained"
    )
    for panel, (name, bars) in zip(panels[:, 0], groups.items(), strict=True):
        labels, values = [label for label, _ in bars], [value for _, value in bars]
        drawn = panel.barh(labels, values, color=[first, *["tab:gray"] * (len(bars) - 1)])
        panel.bar_label(drawn, fmt=" {:,.4g}", fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(name, fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel(unit, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
