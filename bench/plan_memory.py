"""Predicted memory of published runs beside what their authors say of it, and the fit of what DeepSpeed's optimizer for
bf16 takes beside what is known of it (`plan.cluster.programs.DEEPSPEED_BF16`).

    python -m bench.plan_memory [--reference ../shared/reference]

The fit reads trials of BigScience that are not in the reference, of models of other widths. Memory there is what
nvidia-smi showed, as whole GB; whether these are 10^9 or 2^30 bytes is not said, so it is fitted to their mean.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.fit_plan import PUBLISHED
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import known_hardware
from megazero.plan.cluster.predict import step_of_row
from megazero.plan.cluster.programs import DEEPSPEED_BF16

GB = math.sqrt(1e9 * 2**30)
TRIALS = """
106 12288  64 4 12  8 2 67
106 12288  96 4 12  8 2 65
106 12288 128 4 12  8 2 67
106 12288  96 4 12  8 4 79
100 12288  64 4  6 16 2 OOM
100 12288  64 4  6 16 1 OOM
100 12288  64 8  6  8 2 61
100 12288  64 8  6  8 4 72
 82 13312  64 8 12  4 4 52
 82 13312  64 4 12  8 2 63
 82 13312 104 4 12  8 2 62
 82 13312 128 4 12  8 2 60
 82 13312  64 4 12  8 4 74
 94 13312 128 4 12  8 2 67
"""
"""Layers, hidden, heads, tp, pp, dp, micro-batch, GB of the fullest rank: bigscience-workshop/bigscience,
train/tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers". 384 A100 of 80 GB, sequences of 2048, a global batch of
2048, ZeRO-1, bf16, all blocks recomputed.
"""
COMMON = {
    "source": "bigscience",
    "vocab": "250880",
    "seq": "2048",
    "gpu": "A100-80GB",
    "gpus": "384",
    "global_batch": "2048",
    "precision": "bf16 fp32-accumulation",
    "zero_stage": "1",
    "recompute": "full",
}
NAMES = "layers hidden heads tp pp dp micro_batch memory_gb".split()
PARTS = re.compile(r"state ([0-9.]+) GiB; activations ([0-9.]+) GiB")


@dataclass(frozen=True)
class MemoryRow:
    """A row of a table with its memory, and its step."""

    row: Mapping[str, str]
    step: ClusterStep

    @property
    def said(self) -> float | None:
        """Bytes of the fullest rank; None for a run that was out of memory."""
        words = self.row["memory_gb"]
        if parts := PARTS.fullmatch(words):
            return sum(map(float, parts.groups())) * 2**30
        return None if words == "OOM" else float(words) * GB

    @property
    def fitted_in(self) -> bool:
        """Whether the run fitted its device."""
        return self.said is not None and self.said < self.step.cluster.device.memory


def trials() -> list[MemoryRow]:
    rows = [COMMON | dict(zip(NAMES, line.split(), strict=True)) for line in TRIALS.strip().splitlines()]
    return memory_rows(rows)


def memory_rows(rows: Sequence[Mapping[str, str]]) -> list[MemoryRow]:
    """Those of rows that say their memory."""
    hardware = known_hardware()
    return [MemoryRow(row, step_of_row(row, hardware)) for row in rows if row["memory_gb"]]


def published(folder: Path) -> list[MemoryRow]:
    with (folder / PUBLISHED).open(newline="") as file:
        return memory_rows(list(csv.DictReader(file)))


def fitted_bytes(rows: Sequence[MemoryRow]) -> float:
    """Bytes for each parameter with which the mean error of the rows is least, beside what is in `DEEPSPEED_BF16`."""

    def error(more: float) -> float:
        off = [
            abs((row.step.memory_bytes + more * _most_parameters(row.step)) / row.said - 1) for row in rows if row.said
        ]
        return sum(off) / len(off)

    return min((tenth / 10 for tenth in range(-40, 41)), key=error)


def _most_parameters(step: ClusterStep) -> int:
    return max(step.memory(stage).state.parameters for stage in step.alike)


def table(rows: Sequence[MemoryRow]) -> Iterator[str]:
    """Lines of a page."""
    yield "| run | published | predicted | of it state | error |"
    yield "|---|---|---|---|---|"
    for each in rows:
        run, axes, said = each.step.run, each.step.axes, each.said
        name = f"{each.row['source'].split(',')[0]}, {each.row.get('model') or each.row['layers'] + ' layers'}: "
        name += f"tp {axes.tp}, pp {axes.pp}, dp {axes.dp}, recompute {run.parallel.recompute_granularity}, "
        name += f"micro-batch {run.schedule.micro_batch_size}"
        fullest = max(each.step.alike, key=lambda stage: each.step.taken(stage).device_bytes)
        state = each.step.memory(fullest).state.total / GB
        error = f"{each.step.memory_bytes / said - 1:+.1%}" if said else "fits" if each.step.fits else "does not fit"
        words = each.row["memory_gb"].replace("state ", "").replace("; activations ", " and ")
        yield f"| {name} | {words} | {each.step.memory_bytes / GB:.1f} | {state:.1f} | {error} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=Path("../shared/reference"))
    args = parser.parse_args(argv)
    tried = trials()
    print(f"fixed: {tried[0].step.allowance.fixed:.3g} bytes")
    print(f"bytes of a parameter: {DEEPSPEED_BF16.parameter + fitted_bytes(tried):.1f}", *table(tried), "", sep="\n")
    print(*table(published(args.reference)), sep="\n")


if __name__ == "__main__":
    main()
