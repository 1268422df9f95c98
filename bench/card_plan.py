"""Predicted against measured seconds and memory of steps on this machine's GPU, with an entry of a data sheet and with
one of `--calibrate`.

    python -m bench.card_plan                          # calibrates and runs 16 layouts: 5 minutes
    python -m bench.card_plan --hardware here.yaml     # with a calibrated entry that is there
    python -m bench.card_plan --measured card.json     # runs nothing: predicts what was measured before
    python -m bench.card_plan --quick                  # two layouts

The runs of one process follow each other in it, so that imports and kernels are paid for once. Seconds: the median of
three turns of steps. Memory: the most that torch's allocator had, and the driver's context.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import results
from bench.script import parser_of, report, say
from megazero.calibrate.effort import Effort, MeasuredRun
from megazero.calibrate.ranks import NotMeasured, measured
from megazero.calibrate.runs import run_of
from megazero.config.source import ConfigError
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import known_hardware
from megazero.system import device as devices

NAME = "here"
PROCESSES = (
    (
        "--preset gpt2-124m --micro-batch-size 8",
        "--preset gpt2-124m --micro-batch-size 1",
        "--preset gpt2-355m --micro-batch-size 8",
        "--preset gpt3-1.3b --micro-batch-size 4",
        "--preset gpt3-1.3b --micro-batch-size 8 --recompute-granularity full",
        "--preset gpt3-1.3b --micro-batch-size 4 --recompute-granularity selective",
        "--preset gpt3-2.7b --micro-batch-size 2",
        "--preset gpt3-6.7b --num-layers 8 --micro-batch-size 4",
        "--preset gpt2-124m --micro-batch-size 4 --precision fp32",
    ),
    (
        "--preset llama3-8b --num-layers 4 --seq-length 8192 --micro-batch-size 1",
        "--preset llama3-8b --num-layers 4 --seq-length 2048 --micro-batch-size 4",
        "--preset qwen3-1.7b --seq-length 2048 --micro-batch-size 4",
        "--preset gpt3-1.3b --seq-length 1024 --micro-batch-size 4 --offload-optimizer cpu",
        "--preset gpt3-1.3b --micro-batch-size 4 --fp8",
        "--preset gpt3-1.3b --micro-batch-size 1 --cuda-graphs",
    ),
    (
        "--num-layers 24 --hidden-size 1536 --num-attention-heads 16 --seq-length 2048 --vocab-size 250880 "
        "--precision bf16 --micro-batch-size 4",
    ),
)
"""What is run, by process: what needs a compiler comes last. Each step has two micro-batches."""


def card_runs(folder: Path, quick: bool) -> Iterator[tuple[MeasuredRun, float]]:
    """The runs, each with the bytes of its process's context. A process that fails is told, and left out."""
    for lines in [PROCESSES[0][:2]] if quick else PROCESSES:
        runs = tuple(tuple(line.split()) for line in lines)
        effort = replace(Effort.of("cuda", (1,)), runs=(runs,), steps=3, turn=3, precisions=(), largest=1 << 20)
        try:
            done = measured(1, folder, effort)
        except NotMeasured as error:
            say(f"left out: {'; '.join(lines)}: {error}")
            continue
        for run in done.runs:
            say(f"{' '.join(run.flags)}: {run.seconds * 1e3:,.1f} ms, {(run.memory or 0) / 1e9:.2f} GB")
            yield run, done.memory["context"]


@dataclass(frozen=True)
class Predicted:
    """A run with an entry's numbers: seconds of a step, and bytes of the rank with the driver's context."""

    seconds: float
    memory: float


def predicted(run: MeasuredRun, hardware: str | None, name: str) -> Predicted | None:
    """None where the entry has no such precision."""
    try:
        step = ClusterStep(run_of(run.flags, 1, "cuda"), known_hardware(hardware).cluster(name, 1, None, None))
        return Predicted(step.seconds, step.memory_bytes)
    except ConfigError as error:
        say(f"{' '.join(run.flags)}: {error}")
        return None


HEADS = ("flags", "ms", "predicted", "off", "GB", "predicted", "off")


def table(measured_runs: Sequence[tuple[MeasuredRun, float]], hardware: str | None, name: str) -> str:
    """Of an entry."""
    rows = list[list[str]]()
    off = list[tuple[float, float]]()
    for run, context in measured_runs:
        there = predicted(run, hardware, name)
        if there is None:
            continue
        memory = (run.memory or 0) + context
        off.append((there.seconds / run.seconds - 1, there.memory / memory - 1))
        cells = [" ".join(run.flags), f"{run.seconds * 1e3:,.1f}", f"{there.seconds * 1e3:,.1f}", f"{off[-1][0]:+.1%}"]
        rows.append([*cells, f"{memory / 1e9:.2f}", f"{there.memory / 1e9:.2f}", f"{off[-1][1]:+.1%}"])
    means = [sum(abs(each[at]) for each in off) / len(off) for at in (0, 1)]
    return f"{results.table(HEADS, rows)}\n\ntime is off by {means[0]:.1%} in the mean, memory by {means[1]:.1%}"


def calibrated(args: Namespace, folder: Path) -> Path:
    """The entry of this GPU: given, or made now."""
    if args.hardware is not None:
        return Path(args.hardware)
    target = folder / "here.yaml"
    words = ["--calibrate", str(target), "--gpu", NAME, "--gpus", "1"]
    subprocess.run([sys.executable, "-m", "megazero", "plan", *words], env=dict(os.environ), check=True)
    return target


def main() -> None:
    parser = parser_of(__doc__, "two layouts")
    parser.add_argument("--hardware", type=Path, metavar="FILE.yaml", help="a calibrated entry that is there")
    parser.add_argument("--entry", default="h200", help="the entry of a data sheet that is compared (default: h200)")
    parser.add_argument("--measured", type=Path, metavar="FILE.json", help="runs of an earlier call")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megazero-card-") as name:
        kept = found(args, Path(name))
        hardware = Path(name) / "kept.yaml"
        hardware.write_text(kept["hardware"])
        runs = [(MeasuredRun(**run), context) for run, context in kept["runs"]]
        text = f"{args.entry}\n\n{table(runs, None, args.entry)}\n\ncalibrated\n\n{table(runs, str(hardware), NAME)}"
    path = report(args, "card-plan", {"card": kept["card"]}, kept, text)
    say(f"{text}\n\n{path}")


def found(args: Namespace, folder: Path) -> dict[str, Any]:
    """The card, its runs and its entry: measured now, or by an earlier call."""
    if args.measured is not None:
        kept: dict[str, Any] = json.loads(args.measured.read_text())
        return {name: kept[name] for name in ("card", "runs", "hardware")}
    hardware = calibrated(args, folder).read_text()
    runs = [[asdict(run), context] for run, context in card_runs(folder, args.quick)]
    return {"card": devices.card_facts(devices.resolve("cuda", 0)), "runs": runs, "hardware": hardware}


if __name__ == "__main__":
    main()
