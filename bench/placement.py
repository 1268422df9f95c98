"""--placement auto against ten static shares, for real: the seconds of a step of each, in turns.

    python -m bench.placement                              # under 40, 60 and 80 % of what all on the device takes
    python -m bench.placement --percent 60 --nvme-path DIR # one budget; disks are there for auto too
    python -m bench.placement --device cuda --layers 24 --hidden 2048
    python -m bench.placement --quick                      # a tiny model: does it start?

Each contestant is a run of its own, with its own command line. They take turns: all of them run once, then all again.
The median of all steps counts, but for the first ones of each run. Static shares whose predicted bytes exceed the
budget are listed and do not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import results
from megazero.config.parse import parse_run
from megazero.data.indexed import dtype_for
from megazero.data.writer import PairWriter
from megazero.mpu.axes import axes_of
from megazero.plan.placed_step import Cluster, Machine
from megazero.plan.rates import MachineRates
from megazero.system import device as devices

ROOT = Path(__file__).resolve().parents[1]
SHARES = tuple(f"cpu:{tenths / 10:g}" for tenths in range(1, 11))
FIRST = 2
"""Steps of each run that do not count."""
TOKENS = 1 << 20
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
    steps: int = 12
    rounds: int = 3


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


def machine_of(flags: Sequence[str], device: str) -> Machine:
    run = parse_run(list(flags), 1)
    return Machine(run, Cluster(axes_of(run.parallel, 1), devices.kind(device), nccl=False), NO_RATES)


def seconds_of(flags: Sequence[str], folder: Path) -> tuple[list[float], str]:
    """The seconds of the steps of one run, and what its banner says of its placement."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        metrics = Path(own) / "metrics.jsonl"
        command = [sys.executable, "-m", "megazero", "pretrain", *flags, "--metrics-file", str(metrics)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        steps = [json.loads(line)["step_seconds"] for line in metrics.read_text().splitlines()]
    lines = done.stdout.splitlines()
    at = next((n for n, line in enumerate(lines) if line.strip().startswith("placement ")), None)
    return steps[FIRST:], "" if at is None else " ".join(line.strip() for line in lines[at : at + 4])


def compare(flags: Sequence[str], budget: int, machine: Machine, disks: Sequence[str], rounds: int) -> dict[str, Any]:
    """The runs under one budget: seconds of the steps by contestant, and the shares that would exceed it."""
    fits = {share: machine.placed({"offload_optimizer": share}).device.nbytes <= budget for share in SHARES}
    lines = {share: [*flags, "--offload-optimizer", share] for share, keeps in fits.items() if keeps}
    lines["auto"] = [*flags, "--placement", "auto", "--device-memory-budget", str(budget)]
    lines["auto"] += ["--nvme-path", *disks] if disks else []
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    told = ""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for _ in range(rounds):
            for name, words in lines.items():
                steps, said = seconds_of(words, Path(folder))
                seconds[name] += steps
                told = said if name == "auto" else told
    over = [share for share, keeps in fits.items() if not keeps]
    return {"budget": budget, "seconds": seconds, "over_the_budget": over, "told": told}


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Rows of a budget, the fastest first: the contestant, its median, and that over the fastest static share's."""
    medians = {name: statistics.median(steps) for name, steps in found["seconds"].items()}
    best = min((median for name, median in medians.items() if name != "auto"), default=medians["auto"])
    ranked = sorted(medians, key=lambda name: medians[name])
    listed = [[name, f"{medians[name]:.4f}", f"{medians[name] / best:.3f}"] for name in ranked]
    return [*listed, *([share, "over the budget", ""] for share in found["over_the_budget"])]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--percent", type=int, nargs="+", default=[40, 60, 80], help="budgets: %(default)s")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--nvme-path", nargs="*", default=[], help="folders that auto may use")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one budget: a smoke test")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of the results")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    sizes = TINY if args.quick else Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    percents = args.percent[-1:] if args.quick else args.percent
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        corpus = Path(folder) / "corpus"
        with PairWriter(corpus, dtype_for(sizes.vocabulary)) as writer:
            ids = np.random.default_rng(1).integers(0, sizes.vocabulary, TOKENS)
            writer.write(ids.astype(writer.dtype), [len(ids)])
        flags = [*flags_of(sizes, args.device, corpus), "--data-cache-path", str(Path(folder) / "cache")]
        machine = machine_of(flags, args.device)
        need = machine.placed({"offload_optimizer": "none"}).device.nbytes
        found = {
            f"{percent} %": compare(flags, need * percent // 100, machine, args.nvme_path, sizes.rounds)
            for percent in percents
        }
    kind = "placement-quick" if args.quick else "placement"
    settings = {**asdict(sizes), "device": args.device, "nvme_path": args.nvme_path}
    path = results.write(kind, settings, {"need": need, "budgets": found}, args.results)
    heads = ("placement", "seconds of a step", "of the best static share")
    texts = [f"{name}: {one['told']}\n\n{results.table(heads, rows(one))}" for name, one in found.items()]
    path.with_suffix(".md").write_text("\n\n".join(texts) + "\n")
    print("\n\n".join(texts), path, sep="\n\n")


if __name__ == "__main__":
    main()
