"""Predicted against measured seconds and memory of small runs on this machine, with an entry of `--calibrate`.

    python -m bench.calibrated_plan                          # calibrates and runs 16 layouts: 10 minutes when idle
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import results
from bench.script import parser_of, report, say
from megazero.config.parse import parse_run
from megazero.data.indexed import dtype_for
from megazero.data.writer import PairWriter
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import known_hardware
from megazero.system.words import counted

SECONDS_OFF, MEMORY_OFF = 0.12, 0.04
"""What a prediction may be off by."""
STEPS, LAST = 6, 3
"""Steps of a run, and how many of them count."""
ROUNDS = 3
"""In each of which every layout runs once."""
NAME = "here"
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
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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


@dataclass(frozen=True)
class Compared:
    """A layout's predicted and measured numbers."""

    seen: Seen
    seconds: float
    memory: int

    @property
    def off(self) -> tuple[float, float]:
        """Predicted over measured, minus 1: of seconds and of memory."""
        seconds, memory = self.seen.median
        return self.seconds / seconds - 1, self.memory / memory - 1

    @property
    def is_met(self) -> bool:
        return abs(self.off[0]) <= SECONDS_OFF and abs(self.off[1]) <= MEMORY_OFF

    def row(self) -> list[str]:
        layout, (seconds, memory) = self.seen.layout, self.seen.median
        cells = [layout.model, str(layout.ranks), layout.flags.replace(" --nvme-path {folder}", ""), self.seen.rounds]
        cells += [f"{seconds * 1e3:,.0f}", f"{self.seconds * 1e3:,.0f}", f"{self.off[0]:+.1%}"]
        return [*cells, f"{memory / 2**20:,.0f}", f"{self.memory / 2**20:,.0f}", f"{self.off[1]:+.1%}"]


def compared(seen: Seen, hardware: Path, folder: Path) -> Compared:
    layout = seen.layout
    cluster = known_hardware(str(hardware)).cluster(NAME, layout.ranks, None, None)
    step = ClusterStep(parse_run(layout.words(folder), layout.ranks), cluster)
    return Compared(seen, step.seconds, step.memory_bytes)


HEADS = ("model", "ranks", "flags", "rounds, ms", "ms", "predicted", "off", "MiB", "predicted", "off")


def verdict(rows: Sequence[Compared]) -> str:
    """How far off the predictions are."""
    words = []
    for at, (what, most) in enumerate((("time", SECONDS_OFF), ("memory", MEMORY_OFF))):
        off = [abs(row.off[at]) for row in rows]
        met = sum(each <= most for each in off)
        words.append(
            f"{what}: {met} of {len(rows)} layouts within {most:.0%}, {sum(off) / len(off):.1%} in the mean, "
            f"{max(off):.1%} at most"
        )
    return "; ".join(words)


def calibrated(target: Path, quick: bool) -> None:
    """Write an entry of this machine."""
    words = ["--calibrate", str(target), "--gpu", NAME, *(["--gpus", "1"] if quick else [])]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "megazero", "plan", *words], env=environment, check=True)
    say(f"calibrated in {time.perf_counter() - began:.0f} s")


def main() -> None:
    parser = parser_of(__doc__, "one rank and one layout: a smoke test")
    parser.add_argument("--hardware", type=Path, metavar="FILE.yaml", help="an entry that is there; else: one is made")
    parser.add_argument("--only", metavar="N,M", help="numbers of layouts, from 1")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in which each layout runs once (%(default)s)")
    parser.add_argument("--measured", type=Path, metavar="FILE.json", help="runs of an earlier call")
    parser.add_argument("--folder", type=Path, help="for swap files, on a disk (default: of temporary files)")
    args = parser.parse_args()
    numbers = [1] if args.quick else [int(word) for word in (args.only or "").split(",") if word]
    layouts = [LAYOUTS[number - 1] for number in numbers] or list(LAYOUTS)
    with data(args.folder) as folder:
        if args.hardware is None:
            calibrated(folder / "here.yaml", args.quick)
        hardware = args.hardware or folder / "here.yaml"
        if args.measured is None:
            seen = in_turns(layouts, 1 if args.quick else args.rounds, folder)
        else:
            kept = json.loads(args.measured.read_text())["runs"]
            seen = [Seen(Layout(**each.pop("layout")), **each) for each in kept]
        rows = [compared(each, hardware, folder) for each in seen]
        numbers_seen = {"runs": [asdict(each) for each in seen], "hardware": hardware.read_text()}
    text = f"{results.table(HEADS, [row.row() for row in rows])}\n\n{verdict(rows)}"
    path = report(args, "calibrated-plan", {"steps": STEPS, "last": LAST}, numbers_seen, text)
    say(f"{text}\n\n{path}")
    sys.exit(0 if args.quick or all(row.is_met for row in rows) else 1)


if __name__ == "__main__":
    main()
