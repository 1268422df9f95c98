"""Ops and training steps on an NVIDIA GPU, compared with torch, torch.compile and transformers: `make gpu-bench`.

    python -m bench.gpu                       # everything, in less than eight minutes
    python -m bench.gpu --parts ops           # ops or training alone
    python -m bench.gpu --only GPT            # contestants and ops whose name contains this
    python -m bench.gpu --rehearse            # tiny sizes on the CPU: does everything run? Its numbers mean nothing

Nothing is installed or downloaded. Each measurement runs in another process, which may fail or hang without harm to the
rest. The results are written after each part: DATE-gpu.json with every repetition, and a table with a verdict for each
target.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import card

ROOT = Path(__file__).resolve().parents[1]
SECONDS, OPS_SECONDS = 460.0, 130.0
"""Time limits of everything, and of the ops. The rest of eight minutes is for the start and the end."""
ITEM_SECONDS = 45.0
"""Time limit of one op and contestant, with its compilation. After it the process is ended."""


def say(text: str) -> None:
    print(text, flush=True)


@dataclass
class Report:
    """The results so far, and the folder that they are written to; None: they are not written."""

    folder: Path | None
    settings: dict[str, Any]
    found: dict[str, Any]
    path: Path | None = field(default=None)

    def write(self) -> None:
        from bench import gpu_report, results

        if self.folder is not None:
            kind = "gpu-rehearsal" if self.settings["rehearse"] else "gpu"
            self.path = results.write(kind, self.settings, self.found, self.folder, self.path)
            self.path.with_suffix(".md").write_text(gpu_report.as_text(self.found) + "\n")

    def finish(self) -> None:
        """Write the tables and the plot."""
        from bench import gpu_report, results

        self.write()
        say(f"\n{gpu_report.as_text(self.found)}\n")
        bars = gpu_report.bars(self.found)
        if self.path is not None:
            if bars:
                results.plot(self.path.with_suffix(".png"), "A training step on one card", "tokens per second", bars)
            say(str(self.path))


def lines_of(command: Sequence[str], patience: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects that a program prints, until it ends. After `patience()` silent seconds it is ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, bufsize=0
        )
        assert process.stdout is not None
        try:
            while select.select([process.stdout], [], [], max(0.0, patience()))[0]:
                line = process.stdout.readline()
                if not line:
                    break
                if line.startswith(b"{"):
                    yield json.loads(line)
            else:
                say("  it says nothing any more and is ended")
        finally:
            ended = process.poll() is None
            process.kill()
            process.stdout.close()
            if process.wait() and not ended:
                log.seek(0)
                say("\n".join(f"  {line}" for line in log.read().splitlines()[-15:]))


FACTS = "import json; from bench import card; print(json.dumps(card.facts()))"
KERNELS = "import json, sys; from fused_ops import registry; print(json.dumps(registry.describe(sys.argv[1])))"


def card_of(program: str) -> dict[str, Any]:
    """Facts about the GPU, from another process, because this one would keep some of the GPU's memory."""
    return next(lines_of([sys.executable, "-c", program], lambda: 60.0), {"card": "unknown"})


def kernels(rehearse: bool) -> str:
    """Compile the kernels if that has not been done, outside of any timing; return the bodies that run."""
    found = lines_of([sys.executable, "-c", KERNELS, "cpu" if rehearse else "cuda"], lambda: 150.0)
    return ", ".join(sorted(set(next(found, {"": "unknown"}).values())))


def measure_ops(report: Report, only: str, rehearse: bool, deadline: float) -> None:
    """Measure all ops in one process. If an item ends the process, start another one without it."""
    from bench.gpu_ops import items

    waiting = [item for item in items() if only in item[0] or item[0] == "facts"]
    device = ["--device", "cpu", "--tiny"] if rehearse else ["--device", "cuda"]
    while waiting and time.monotonic() < deadline:
        begun, left = None, deadline - time.monotonic()
        command = [sys.executable, "-m", "bench.gpu_ops", json.dumps(waiting), *device, "--seconds", f"{left:.0f}"]
        for line in lines_of(command, lambda: min(ITEM_SECONDS, deadline + 10 - time.monotonic())):
            if "begin" in line:
                begun = tuple(line["begin"])
                continue
            waiting.remove(tuple(line["item"]))
            begun = None
            keep_op(report, line)
        if begun is None and waiting:
            begun = waiting[0]  # it ended before it printed anything
        if begun is not None:
            waiting.remove(begun)
            keep_op(report, {"item": list(begun), "skipped": "its process ended or hung"})
    for item in waiting:
        keep_op(report, {"item": list(item), "skipped": "no time was left"})
    report.write()


def keep_op(report: Report, line: dict[str, Any]) -> None:
    name, dtype, who = line["item"]
    if name == "facts" and "skipped" not in line:
        report.found["facts"] = {key: value for key, value in line.items() if key != "item"}
        say(
            f"  the card: {line['copy_bytes_per_second'] / 1e9:,.1f} GB/s, "
            f"{line['matmul_flops_per_second'] / 1e12:,.2f} TFLOP/s"
        )
        return
    report.found["ops"].append(line)
    parts = ", ".join(
        f"{part} {statistics.median(times) * 1e3:.3f} ms" for part, times in line.get("seconds", {}).items()
    )
    say(f"  {name} {dtype} {who}: {parts or 'skipped, ' + line['skipped']}")


def measure_training(report: Report, only: str, rehearse: bool, deadline: float) -> None:
    from bench.gpu_train import RUNNERS, Plan, as_settings, rehearsed, trained

    plan = Plan(2, 2, 1, 4) if rehearse else Plan()
    runners = [rehearsed(runner) if rehearse else runner for runner in RUNNERS if only in runner.name]
    report.settings["training"] = as_settings(plan, runners)
    for runner, result in trained(runners, plan, deadline, say):
        about = {"model": runner.work.name, "name": runner.entry.name, "kind": runner.kind, "note": runner.entry.note}
        report.found["training"].append(about | result)
        shown = (
            f"skipped, {result['skipped']}" if "skipped" in result else f"{result['tokens_per_second']:,.0f} tokens/s"
        )
        say(f"  {shown}")
        report.write()


PARTS = {"ops": measure_ops, "training": measure_training}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas: %(default)s")
    parser.add_argument("--only", default="", help="ops and contestants whose name contains this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (%(default)s)")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, tiny; writes nothing unless --results is given"
    )
    parser.add_argument("--results", type=Path, help="folder of the results (bench/results)")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return args


def main() -> None:
    args = arguments()
    began = time.monotonic()
    missing = None if args.rehearse else card.why_not()
    if missing is not None:
        sys.exit(f"make gpu-bench: {missing}; nothing was measured")
    about = {"card": "none: a rehearsal"} if args.rehearse else card_of(FACTS)
    folder = args.results or (None if args.rehearse else ROOT / "bench" / "results")
    note = "A rehearsal on the CPU with tiny sizes. Its numbers say nothing about any card." if args.rehearse else ""
    say(note or ", ".join(f"{name} {value}" for name, value in about.items()))
    say(f"kernels: {kernels(args.rehearse)}, after {time.monotonic() - began:.0f} s")
    settings = {"seconds": args.seconds, "parts": args.parts, "only": args.only, "rehearse": args.rehearse}
    report = Report(folder, settings, {"card": about, "note": note, "facts": {}, "ops": [], "training": []})
    for part in args.parts:
        deadline = began + args.seconds
        if part == "ops" and "training" in args.parts and not args.rehearse:
            deadline = min(deadline, time.monotonic() + OPS_SECONDS)
        say(f"{part}:")
        PARTS[part](report, args.only, args.rehearse, deadline)
    report.settings["took_seconds"] = time.monotonic() - began
    report.finish()
    if not report.found["ops"] and not report.found["training"]:
        sys.exit("make gpu-bench: nothing was measured")


if __name__ == "__main__":
    main()
