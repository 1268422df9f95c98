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

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import compared_steps
from bench.compared_steps import ENTRY, ComparedStep, StepTable
from bench.script import report, say
from megazero.calibrate.effort import Effort
from megazero.calibrate.ranks import NotMeasured, measured
from megazero.calibrate.runs import run_of
from megazero.config.source import ConfigError
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import known_hardware
from megazero.system import device as devices

TABLE = StepTable(("flags",), ("GB", 1e9), (1, 2), (0.1, 0.03))
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


def measured_here(folder: Path, quick: bool) -> dict[str, Any]:
    """The card, and pairs of its runs and the bytes of their process's context. A process that fails is told, and left
    out.
    """
    runs = list[tuple[dict[str, Any], float]]()
    for lines in [PROCESSES[0][:2]] if quick else PROCESSES:
        flags = tuple(tuple(line.split()) for line in lines)
        effort = replace(Effort.of("cuda", (1,)), runs=(flags,), steps=3, turn=3, precisions=(), largest=1 << 20)
        try:
            done = measured(1, folder, effort)
        except NotMeasured as error:
            say(f"left out: {'; '.join(lines)}: {error}")
            continue
        for run in done.runs:
            say(f"{' '.join(run.flags)}: {run.seconds * 1e3:,.1f} ms, {(run.memory or 0) / 1e9:.2f} GB")
            runs.append((asdict(run), done.memory["context"]))
    return {"card": devices.card_facts(devices.resolve("cuda", 0)), "runs": runs}


def compared(runs: Sequence[tuple[dict[str, Any], float]], hardware: str | None, name: str) -> Iterator[ComparedStep]:
    """The runs with what an entry predicts, but for those of precisions that the entry has not."""
    for run, context in runs:
        words = " ".join(run["flags"])
        try:
            cluster = known_hardware(hardware).cluster(name, 1, None, None)
            step = ClusterStep(run_of(run["flags"], 1, "cuda"), cluster)
            predicted = step.seconds, step.memory_bytes
        except ConfigError as error:
            say(f"{words}: {error}")
            continue
        yield ComparedStep((words,), (run["seconds"], run["memory"] + context), predicted)


def main() -> None:
    parser = compared_steps.steps_parser(__doc__, "two layouts")
    parser.add_argument("--entry", default="h200", help="the entry of a data sheet that is compared (default: h200)")
    args = parser.parse_args()
    compared_steps.leave_threads_to_ranks()
    with tempfile.TemporaryDirectory(prefix="megazero-card-") as name:
        hardware = compared_steps.entry_file(args, Path(name), ["--gpus", "1"])
        kept = compared_steps.earlier(args) or measured_here(Path(name), args.quick)
        numbers = {"card": kept["card"], "runs": kept["runs"], "hardware": hardware.read_text()}
        of_sheet = TABLE.text([*compared(kept["runs"], None, args.entry)])
        of_calibration = TABLE.text([*compared(kept["runs"], str(hardware), ENTRY)])
    text = f"{args.entry}\n\n{of_sheet}\n\ncalibrated\n\n{of_calibration}"
    path = report(args, "card-plan", {"card": kept["card"]}, numbers, text)
    say(f"{text}\n\n{path}")


if __name__ == "__main__":
    main()
