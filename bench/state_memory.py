"""The memory of a 400M-parameter model on every rank: predicted, allocated, metered, and resident.

    python -m bench.state_memory                      # every layout that fits into the memory that is free
    python -m bench.state_memory --layouts dp4-z3,pp2-dp2-z3
    python -m bench.state_memory --quick              # a tiny model

For each layout, in MiB of the rank that holds most:

predicted     bytes of the model state by `plan.rank_state`: weights, gradients, optimizer
allocated     the same as the run has allocated them
construction  the peak of all living tensors while the model is built, as torch's profiler meters them
step          the same during the steps
by trace      the peak of a step as --memory-trace predicts it, and what the metered one is of it
resident      the peak of the resident set during the steps, above that after the imports

Samples are short and micro-batches small, so that the model state is most of it. Needs Linux.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import results
from bench.contestants.megazero_ import flags_of
from bench.entries import megazero
from bench.harness import Contestant, Unavailable
from bench.script import parser_of, report
from bench.workload import Workload
from megazero.config.parse import ConfigError, parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.rank_state import stage_bytes

MODELS = {
    "400M": Workload(
        "400M",
        layers=12,
        hidden=1536,
        heads=12,
        sequence=64,
        vocabulary=39424,
        micro_batch=1,
        micro_batches=2,
        threads=1,
    ),
    "130M": Workload(
        "130M", layers=9, hidden=960, heads=12, sequence=64, vocabulary=39424, micro_batch=1, micro_batches=2, threads=1
    ),
}
"""The 400M model with every stage at dp 4 needs more memory than many a machine has. The smaller one compares them."""
STEPS = 3
BESIDES = 1 << 30
"""Bytes of a rank besides its model state: what is imported, activations, buffers of messages."""


@dataclass(frozen=True)
class Layout:
    """Flags and the numbers of ranks and of data-parallel replicas."""

    ranks: int
    replicas: int
    flags: tuple[str, ...]


def _layouts() -> dict[str, Layout]:
    found = {}
    for stage in range(4):
        zero = ("--zero-stage", str(stage))
        found[f"dp4-z{stage}"] = Layout(4, 4, zero)
        found[f"dp4-z{stage}-k2"] = Layout(4, 4, (*zero, "--zero-shard-size", "2"))
        found[f"pp2-dp2-z{stage}"] = Layout(4, 2, (*zero, "--pp", "2"))
    return found


LAYOUTS = _layouts()


def free_bytes() -> int:
    """Memory that is free on this machine now."""
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) * 1024


def needed(work: Workload, layout: Layout) -> int:
    """Bytes that all ranks of the layout take together. Raises ConfigError for flags that the program refuses."""
    run = parse_run([*flags_of(work, Path("."), layout.replicas), *layout.flags], layout.ranks)
    axes = axes_of(run, layout.ranks)
    a_stage = layout.ranks // axes.pp
    return sum(a_stage * stage.total for stage in stage_bytes(run, axes)) + layout.ranks * BESIDES


def measure(work: Workload, layout: Layout) -> list[dict[str, Any]]:
    """The report of every rank. Raises Unavailable."""
    entry = megazero("megazero", *layout.flags, replicas=layout.replicas)
    contestant = Contestant(replace(work, ranks=layout.ranks), replace(entry, module="megazero_meter"), patience=900)
    try:
        contestant.prepare(1)
        contestant.steps(STEPS - 1)
        resident = contestant.ask("memory")
        reports = contestant.ask("report")
    finally:
        contestant.stop()
    return [report | {"resident_mib": found["peak"]} for report, found in zip(reports, resident, strict=True)]


HEADINGS = (
    "layout",
    "predicted",
    "allocated",
    "weights",
    "gradients",
    "optimizer",
    "construction",
    "step",
    "by trace",
    "ratio",
    "resident",
)


def row(name: str, ranks: list[dict[str, Any]]) -> list[str]:
    """The rank whose step has the largest peak."""
    rank = max(ranks, key=lambda found: found["peaks"]["step"]["peak"])
    held = dict(rank["held"])
    weights, gradients = held.pop("parameter") + held.pop("frozen", 0), held.pop("gradient")
    parts = (sum(rank["predicted"].values()), sum(rank["held"].values()), weights, gradients, sum(held.values()))
    metered = [rank["peaks"][phase]["peak"] for phase in ("construction", "step")]
    traced = sum(rank["predicted_step"].values())
    sizes = (f"{size / 2**20:,.1f}" for size in (*parts, *metered, traced))
    return [name, *sizes, f"{metered[1] / traced:.4f}", f"{rank['resident_mib']:,.1f}"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, with commas: %(default)s")
    parser.add_argument("--model", choices=tuple(MODELS), default="400M", help="%(default)s")
    args = parser.parse_args()
    work = MODELS[args.model]
    if args.quick:
        work = replace(work, layers=2, hidden=64, heads=2, sequence=16, vocabulary=256)
    found: dict[str, list[dict[str, Any]]] = {}
    left_out: dict[str, str] = {}
    for name in args.layouts.split(","):
        layout = LAYOUTS[name]
        try:
            wants = needed(work, layout)
            if wants > free_bytes():
                raise Unavailable(f"it needs {wants / 2**30:.1f} GiB, and {free_bytes() / 2**30:.1f} GiB are free")
            found[name] = measure(work, layout)
            print(name, *row(name, found[name])[1:], flush=True)
        except (Unavailable, ConfigError) as reason:
            left_out[name] = str(reason)
            print(f"{name}: left out: {reason}", flush=True)
    settings = {"work": asdict(work), "steps": STEPS}
    data = {"layouts": found, "left_out": left_out}
    text = results.table(HEADINGS, [row(name, ranks) for name, ranks in found.items()])
    notes = "\n".join(f"* {name} left out: {' '.join(reason.split())}" for name, reason in left_out.items())
    path = report(args, f"state-memory-{work.name}", settings, data, f"{text}\n\n{notes}")
    print(text, notes, json.dumps(results.machine()), path, sep="\n\n")


if __name__ == "__main__":
    main()
