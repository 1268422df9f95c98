"""How much of a backend's communication in a step overlaps with computation, from a trace of the profiler.

    torchrun --nproc-per-node 2 -m bench.overlap                        # ZeRO-1 at W1
    torchrun --nproc-per-node 2 -m bench.overlap --tp 2                 # any layout of megazero's own flags
    torchrun --nproc-per-node 2 -m bench.overlap --no-overlap           # for comparison

Prints, for each kind of message, its milliseconds under way on rank 0 and the fraction of them in which that rank
computed. The trace goes to --trace, for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.contestants.megazero_ import build_megazero
from bench.workload import Workload

STEPS = 2

Span = tuple[float, float]
"""(begin, end) in microseconds."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, as disjoint spans in order."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def shared(one: list[Span], other: list[Span]) -> float:
    """The microseconds that lie in both of two unions."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def measure(layout: list[str], trace: Path | None) -> dict[str, tuple[float, float]]:
    """Kind of message -> (milliseconds under way, fraction of them that overlaps with computation) in a step."""
    replicas = int(os.environ["WORLD_SIZE"]) if "--tp" not in layout and "--pp" not in layout else 1
    trainer = build_megazero(Workload("W1"), layout, replicas).trainer
    for _ in range(3):
        trainer.train_step(stop=False)
    with profile(activities=[ProfilerActivity.CPU]) as run:
        for _ in range(STEPS):  # several, because parameters are gathered during the forward of the next step
            trainer.train_step(stop=False)
    if trace is not None and trainer.grid.rank == 0:
        run.export_chrome_trace(str(trace))
    messages: dict[str, list[Span]] = defaultdict(list)
    computing: list[Span] = []
    for event in run.events():
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith("gloo:"):
            messages[event.name].append(span)
        elif event.name.startswith(
            ("aten::mm", "aten::addmm", "aten::linear", "_Linear", "_Attention", "_Activation", "_HeadLoss", "_Norm")
        ):
            computing.append(span)
    busy = merged(computing)
    unions = {name: merged(spans) for name, spans in messages.items()}
    lengths = {name: sum(end - begin for begin, end in spans) for name, spans in unions.items()}
    return {
        name: (lengths[name] / 1e3 / STEPS, shared(spans, busy) / max(lengths[name], 1e-9))
        for name, spans in unions.items()
    }


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="file for the trace (.json)")
    options, layout = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("BENCH_FOLDER", folder)
        # Shared memory does not overlap: a rank copies its tensors itself, between computations.
        found = measure(["--no-shared-memory", *(layout or ["--zero-stage", "1"])], options.trace)
    if os.environ["RANK"] == "0":
        for name, (milliseconds, share) in sorted(found.items()):
            print(
                f"{name:<24}{milliseconds:9.1f} ms under way, {100 * share:5.1f}% of it under computation", flush=True
            )
    os._exit(0)  # gloo's threads may still wait for the other ranks


if __name__ == "__main__":
    main()
