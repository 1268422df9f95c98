"""--placement auto against static placements, for real: seconds of a step in turns, and the most memory of each.

    python -m bench.placement --nvme-path DIR             # auto under 40, 60 and 80 % of what all on the device takes
    python -m bench.placement --nvme-path DIR --add FILE  # one more turn, added to those of a file of results
    python -m bench.placement --nvme-path DIR --add FILE --turns 0 --meter   # what its contestants allocate
    python -m bench.placement --device cuda --layers 24 --hidden 2048
    python -m bench.placement --quick                     # a tiny model: does it start?

Each contestant is a run of its own, with its own command line. They take turns: all of them run once, then all again.
The median of all steps counts, but for the first ones of each run. `auto` measures the rates and searches in each of
its runs. A static placement does not depend on a budget: each runs once in a turn, and is compared under the budgets
that its predicted bytes keep. Peaks are those of torch's allocator in a step, as its profiler sees them, in runs that
are not timed. On a CPU they have what left the device too, so a budget is kept if the peak is below it and what rests
elsewhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bench import results, state_memory
from bench.workload import Workload
from megazero.config.options import run_options
from megazero.config.parse import parse_run
from megazero.config.placement import ROWS, applied, as_flags
from megazero.data.indexed import dtype_for
from megazero.data.writer import PairWriter
from megazero.mpu.axes import axes_of
from megazero.plan.placed_step import Cluster, Machine
from megazero.plan.rates import MachineRates
from megazero.system import device as devices

ROOT = Path(__file__).resolve().parents[1]
STATIC: tuple[dict[str, Any], ...] = (
    {"offload_optimizer": "cpu:0.4"},
    {"offload_optimizer": "cpu:0.7"},
    {"offload_optimizer": "cpu"},
    {"offload_optimizer": "cpu", "late_update": True},
    {"offload_optimizer": "nvme:0.4"},
    {"offload_optimizer": "nvme"},
    {"offload_optimizer": "cpu:0.7", "offload_params": "cpu:0.5"},
    {"offload_optimizer": "cpu", "offload_params": "cpu"},
    {"offload_optimizer": "cpu", "offload_activations": "cpu"},
    {"offload_optimizer": "cpu", "offload_params": "cpu", "offload_activations": "cpu"},
    {"offload_optimizer": "cpu", "offload_params": "nvme", "offload_activations": "cpu"},
)
"""What a user would try by hand. Without --nvme-path those with disks are left out."""
DEVICE = "all on the device"
FIRST = 2
"""Steps of each run that do not count."""
TOKENS = 1 << 20
MIB = 2**20
Lines = dict[str, list[str]]
"""Contestant -> the flags of its run."""
NO_RATES = MachineRates(1.0, 1.0, 1.0, 1.0, 1.0)
"""Bytes do not depend on them."""


@dataclass(frozen=True)
class Sizes:
    """A model, its batch and the length of a run."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    sequence: int = 512
    vocabulary: int = 8192
    micro_batches: int = 4
    steps: int = 7
    turns: int = 1


TINY = Sizes(2, 32, 2, 16, 64, 2, 4, 1)


def flags_of(sizes: Sizes, device: str, corpus: Path) -> list[str]:
    """The command line that all contestants share."""
    words = {
        "num-layers": sizes.layers,
        "hidden-size": sizes.hidden,
        "num-attention-heads": sizes.heads,
        "seq-length": sizes.sequence,
        "vocab-size": sizes.vocabulary,
        "micro-batch-size": 1,
        "global-batch-size": sizes.micro_batches,
        "train-iters": sizes.steps,
        "precision": "bf16",
        "device": device,
        "data-path": corpus,
        "split": "100,0,0",
        "eval-iters": 0,
        "num-workers": 0,
    }
    return [part for name, value in words.items() for part in (f"--{name}", str(value))]


def machine_of(flags: Sequence[str], device: str, disks: Sequence[str]) -> Machine:
    run = applied(parse_run(list(flags), 1), {"nvme_path": tuple(disks)})
    return Machine(run, Cluster(axes_of(run.parallel, 1), devices.kind(device), nccl=False), NO_RATES)


def contestants(flags: Sequence[str], need: int, percents: Sequence[int], disks: Sequence[str]) -> Lines:
    """The command line of each contestant, by its name: a static placement is called by its flags."""
    nvme = ["--nvme-path", *disks] if disks else []
    tables = [table for table in STATIC if disks or "nvme" not in str(table)]
    words = [as_flags(table) for table in tables]
    lines = {DEVICE: [*flags], **{word: [*flags, *word.split(), *nvme * ("nvme" in word)] for word in words}}
    for percent in percents:
        budget = need * percent // 100
        lines[auto(percent)] = [*flags, "--placement", "auto", "--device-memory-budget", str(budget), *nvme]
    return lines


def auto(percent: int) -> str:
    return f"auto under {percent} %"


def run_once(flags: Sequence[str], folder: Path) -> tuple[list[float], str]:
    """The seconds of the steps of one run, and what its banner says of its placement."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        metrics = Path(own) / "metrics.jsonl"
        command = [sys.executable, "-m", "megazero", "pretrain", *flags, "--metrics-file", str(metrics)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        steps = [json.loads(line)["step_seconds"] for line in metrics.read_text().splitlines()]
    lines = [line.strip() for line in done.stdout.splitlines()]
    at = next((n for n, line in enumerate(lines) if line.startswith("placement ")), len(lines))
    end = next((n for n in range(at, len(lines)) if not lines[n]), at)
    return steps[FIRST:], " ".join(lines[at:end]).removeprefix("placement").strip()


def take_turn(found: dict[str, Any], lines: Lines) -> None:
    """Run all contestants once, and add what was measured to `found`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name, words in lines.items():
            seconds, told = run_once(words, Path(folder))
            found["seconds"].setdefault(name, []).append(seconds)
            if name not in (DEVICE, *map(as_flags, STATIC)):
                found["told"].setdefault(name, []).append(told)


def placement_of(name: str, found: dict[str, Any]) -> str:
    """The flags of a contestant: those that `auto` chose in its last turn."""
    words = found["told"][name][-1].partition(": a predicted step")[0] if name in found["told"] else name
    return "" if words.startswith(DEVICE) else words


def settings_of(words: str) -> dict[str, Any]:
    """The settings that these flags of a placement give."""
    rows = {run_options()[row.field].flag: row.field for row in ROWS.values()}
    parts, settings = words.split(), dict[str, Any]()
    for at, part in enumerate(parts):
        if part in rows:
            value = parts[at + 1] if at + 1 < len(parts) and parts[at + 1] not in rows else True
            settings[rows[part]] = value if value is True else run_options()[rows[part]].from_value(value)
    return settings


def meter(found: dict[str, Any], sizes: Sizes, disks: Sequence[str]) -> None:
    """Add the peak of a step of every contestant in bytes, where it is not known yet."""
    shape = {name: getattr(sizes, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    work = Workload("placement", **shape, micro_batch=1, micro_batches=sizes.micro_batches)
    for words in sorted({placement_of(name, found) for name in found["seconds"]} - found["metered"].keys()):
        flags = (*words.split(), *("--nvme-path", *disks) * ("nvme" in words))
        (report,) = state_memory.measure(work, state_memory.Layout(1, 1, flags))
        found["metered"][words] = report["peaks"]["step"]["peak"]


HEADS = ("placement", "seconds of a step", "of the best static one", "device, MiB", "host, MiB", "metered, MiB", "sum")


def rows(found: dict[str, Any], machine: Machine, percent: int) -> list[list[str]]:
    """Rows of a budget, the fastest first: the contestant, its median and that over the fastest static one's, the
    bytes that it takes by its plan, what was metered, and of the sum of the plan's.
    """
    budget, mine = found["need"] * percent // 100, auto(percent)
    names = [name for name in found["seconds"] if name == mine or not name.startswith("auto")]
    steps = {name: machine.placed(settings_of(placement_of(name, found))) for name in names}
    medians = {name: statistics.median(chain.from_iterable(found["seconds"][name])) for name in names}
    within = [name for name in names if steps[name].device.nbytes <= budget]
    best = min((medians[name] for name in within if name != mine), default=medians[mine])
    told = []
    for name in sorted(names, key=lambda name: (name not in within, medians[name])):
        device, host, peak = (
            steps[name].device.nbytes,
            steps[name].host,
            found["metered"].get(placement_of(name, found)),
        )
        ratio = f"{medians[name] / best:.3f}" if name in within else "over the budget"
        sizes = [f"{device / MIB:,.0f}", f"{host / MIB:,.0f}"]
        sizes += ["", ""] if peak is None else [f"{peak / MIB:,.0f}", f"{peak / (device + host):.3f}"]
        shown = f"{mine}: {placement_of(name, found) or DEVICE}" if name == mine else name
        told.append([shown, f"{medians[name]:.3f}", ratio, *sizes])
    return told


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--percent", type=int, nargs="+", default=[40, 60, 80], help="budgets: %(default)s")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--nvme-path", nargs="*", default=[], help="folders for what goes to disks")
    parser.add_argument("--add", type=Path, help="a file of results of the same settings, to which this run adds")
    parser.add_argument("--meter", action="store_true", help="meter the memory of all contestants, on a CPU")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one budget: a smoke test")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of the results")
    return parser.parse_args()


def write_corpus(path: Path, vocabulary: int) -> None:
    with PairWriter(path, dtype_for(vocabulary)) as writer:
        ids = np.random.default_rng(1).integers(0, vocabulary, TOKENS)
        writer.write(ids.astype(writer.dtype), [len(ids)])


def main() -> None:
    args = arguments()
    sizes = TINY if args.quick else Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    percents = args.percent[-1:] if args.quick else args.percent
    found: dict[str, Any] = {"seconds": {}, "told": {}, "metered": {}}
    if args.add is not None:
        found |= {name: json.loads(args.add.read_text())[name] for name in found}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        corpus = Path(folder) / "corpus"
        write_corpus(corpus, sizes.vocabulary)
        flags = [*flags_of(sizes, args.device, corpus), "--data-cache-path", str(Path(folder) / "cache")]
        machine = machine_of(flags, args.device, args.nvme_path)
        found["need"] = machine.placed({}).device.nbytes
        lines = contestants(flags, found["need"], percents, args.nvme_path)
        for _ in range(sizes.turns):
            take_turn(found, lines)
    if args.meter:
        meter(found, sizes, args.nvme_path)
    settings = {**asdict(replace(sizes, turns=len(found["seconds"][DEVICE]))), "device": args.device}
    kind = "placement-quick" if args.quick else "placement"
    path = results.write(kind, settings, found, args.results, args.add)
    texts = [
        f"{percent} % of {found['need']:,} bytes. {found['told'][auto(percent)][-1]}\n\n"
        f"{results.table(HEADS, rows(found, machine, percent))}"
        for percent in percents
    ]
    path.with_suffix(".md").write_text("\n\n".join(texts) + "\n")
    print("\n\n".join(texts), path, sep="\n\n")


if __name__ == "__main__":
    main()
