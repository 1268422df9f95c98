"""Predicted against measured seconds and memory of small runs on this machine, with an entry of `--calibrate`.

    python -m bench.calibrated_plan                          # calibrates and runs 16 layouts: 18 minutes when idle
    python -m bench.calibrated_plan --hardware here.yaml     # with an entry that is there
    python -m bench.calibrated_plan --only 1,7 --rounds 5    # some of the layouts, more often
    python -m bench.calibrated_plan --measured runs.json     # runs nothing: predicts what was measured before
    python -m bench.calibrated_plan --quick                  # a short calibration and one layout: does it start?

A machine may change its pace every half minute, which is longer than a run. So the layouts run in turns, each once in
a round, and of both numbers the median of the rounds counts. Seconds of a run: the median of its last steps in the
metrics file. Memory: the most bytes of the fullest rank there. Status 1 if a layout is off by more than 12% in time or
4% in memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import compared_steps
from bench.compared_steps import ENTRY, ComparedStep, StepTable
from bench.script import report, say
from megazero.config.parse import parse_run
from megazero.data.indexed import dtype_for
from megazero.data.writer import PairWriter
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import known_hardware
from megazero.system.words import counted

TABLE = StepTable(("model", "ranks", "flags", "rounds, ms"), ("MiB", 2**20), (0, 0), (0.12, 0.04))
STEPS, LAST = 10, 5
"""Steps of a run, and how many of them count. With fewer, a pipeline has not yet taken all the memory that it takes."""
ROUNDS = 3
"""In each of which every layout runs once."""
WIDE = (
    "--num-layers 4 --hidden-size 384 --num-attention-heads 6 --seq-length 256 --vocab-size 4096 --precision bf16 "
    "--global-batch-size 8"
)
LONG = (
    "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --vocab-size 8192 --precision fp32 "
    "--global-batch-size 4"
)
MODELS: Mapping[str, str] = {"wide": WIDE, "long": LONG}


@dataclass(frozen=True)
class Layout:
    """A layout that is run. model: of `MODELS`; flags: what else is given; {folder} is one for swap files."""

    model: str
    ranks: int
    flags: str

    def words(self, folder: Path) -> list[str]:
        fixed = "--eod-id 0 --split 1,0,0 --eval-iters 0 --lr 1e-4 --device cpu"
        words = f"{MODELS[self.model]} {fixed} --train-iters {STEPS} {self.flags}".split()
        return [*(word.format(folder=folder) for word in words), "--data-path", str(folder / f"words-{self.model}")]


LAYOUTS = (
    Layout("wide", 1, "--micro-batch-size 2"),
    Layout("wide", 1, "--micro-batch-size 4 --recompute-granularity full"),
    Layout("wide", 1, "--micro-batch-size 2 --offload-optimizer cpu"),
    Layout("wide", 1, "--micro-batch-size 2 --offload-optimizer nvme --nvme-path {folder}"),
    Layout("long", 1, "--micro-batch-size 1 --recompute-granularity selective"),
    Layout("wide", 2, "--micro-batch-size 2 --zero-stage 1"),
    Layout("wide", 2, "--micro-batch-size 2 --zero-stage 3"),
    Layout("long", 2, "--micro-batch-size 1 --zero-stage 2 --offload-optimizer cpu"),
    Layout("wide", 2, "--micro-batch-size 2 --tp 2"),
    Layout("long", 2, "--micro-batch-size 2 --tp 2 --sequence-parallel --recompute-granularity selective"),
    Layout("wide", 2, "--micro-batch-size 1 --pp 2"),
    Layout("wide", 4, "--micro-batch-size 1 --zero-stage 0"),
    Layout("wide", 4, "--micro-batch-size 2 --zero-stage 3 --offload-optimizer nvme --nvme-path {folder}"),
    Layout("wide", 4, "--micro-batch-size 2 --tp 2 --zero-stage 1"),
    Layout("wide", 4, "--micro-batch-size 1 --pp 2 --zero-stage 1"),
    Layout("long", 4, "--micro-batch-size 1 --tp 2 --pp 2"),
)


@dataclass(frozen=True)
class Seen:
    """A layout that has run, with numbers by round. seconds: the median of a step; memory: bytes of the fullest rank;
    loads: of the machine before the run.
    """

    layout: Layout
    seconds: tuple[float, ...]
    memory: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def median(self) -> tuple[float, float]:
        """(seconds, bytes)."""
        return statistics.median(self.seconds), statistics.median(self.memory)

    @property
    def rounds(self) -> str:
        """The number of rounds, and the milliseconds of the fastest and of the slowest one."""
        return f"{len(self.seconds)}: {min(self.seconds) * 1e3:,.0f} to {max(self.seconds) * 1e3:,.0f}"


@contextmanager
def data(within: Path | None) -> Iterator[Path]:
    """A folder with the words that runs train on. within: None: the system's folder of temporary files."""
    with tempfile.TemporaryDirectory(prefix="megazero-calibrated-", dir=within) as name:
        folder = Path(name).resolve()
        for model, flags in MODELS.items():
            words = flags.split()
            vocabulary, length = (int(words[words.index(flag) + 1]) for flag in ("--vocab-size", "--seq-length"))
            draws = np.random.default_rng(17).integers(1, vocabulary, (256, length + 1))
            with PairWriter(folder / f"words-{model}", dtype_for(vocabulary)) as writer:
                for row in draws:
                    writer.write(row.astype(writer.dtype), [len(row)])
        yield folder


def run(layout: Layout, folder: Path) -> tuple[float, int, float]:
    """(seconds, bytes, load) of a training with a layout, started as a user does. Raises RuntimeError if it fails."""
    metrics, load = folder / "metrics.jsonl", os.getloadavg()[0]
    metrics.unlink(missing_ok=True)
    flags = ["--metrics-file", str(metrics), "--ranks", str(layout.ranks), *layout.words(folder)]
    command = [sys.executable, "-m", "megazero", "pretrain", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = statistics.median(step["step_seconds"] for step in steps[-LAST:])
    return seconds, max(step["peak_memory_bytes"] for step in steps), load


def in_turns(layouts: Sequence[Layout], rounds: int, folder: Path) -> list[Seen]:
    """What the layouts reach, of which each runs once in a round."""
    done = [list[tuple[float, int, float]]() for _ in layouts]
    for number in range(1, rounds + 1):
        for layout, of_layout in zip(layouts, done, strict=True):
            of_layout.append(run(layout, folder))
            ranks, seconds = counted(layout.ranks, "rank"), of_layout[-1][0]
            say(f"round {number}: {layout.model}, {ranks} {layout.flags}: {seconds * 1e3:,.0f} ms")
    return [Seen(layout, *zip(*of_layout, strict=True)) for layout, of_layout in zip(layouts, done, strict=True)]


def compared(seen: Seen, hardware: Path, folder: Path) -> ComparedStep:
    """With what an entry predicts. folder: of data and of swap files."""
    layout = seen.layout
    cluster = known_hardware(str(hardware)).cluster(ENTRY, layout.ranks, None, None)
    step = ClusterStep(parse_run(layout.words(folder), layout.ranks), cluster)
    words = (layout.model, str(layout.ranks), layout.flags.replace(" --nvme-path {folder}", ""), seen.rounds)
    return ComparedStep(words, seen.median, (step.seconds, step.memory_bytes))


def main() -> None:
    parser = compared_steps.steps_parser(__doc__, "one rank and one layout: a smoke test")
    parser.add_argument("--only", metavar="N,M", help="numbers of layouts, from 1")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in which each layout runs once (%(default)s)")
    parser.add_argument("--folder", type=Path, help="for swap files, on a disk (default: of temporary files)")
    args = parser.parse_args()
    compared_steps.leave_threads_to_ranks()
    chosen = [1] if args.quick else [int(word) for word in (args.only or "").split(",") if word]
    layouts = [LAYOUTS[number - 1] for number in chosen] or list(LAYOUTS)
    with data(args.folder) as folder:
        hardware = compared_steps.entry_file(args, folder, ["--gpus", "1"] if args.quick else [])
        if kept := compared_steps.earlier(args):
            seen = [Seen(**{**each, "layout": Layout(**each["layout"])}) for each in kept["runs"]]
        else:
            seen = in_turns(layouts, 1 if args.quick else args.rounds, folder)
        rows = [compared(each, hardware, folder) for each in seen]
        numbers = {"runs": [asdict(each) for each in seen], "hardware": hardware.read_text()}
    text = TABLE.text(rows)
    path = report(args, "calibrated-plan", {"steps": STEPS, "last": LAST}, numbers, text)
    say(f"{text}\n\n{path}")
    sys.exit(0 if args.quick or all(TABLE.is_met(row) for row in rows) else 1)


if __name__ == "__main__":
    main()
