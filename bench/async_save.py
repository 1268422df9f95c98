"""What a checkpoint costs a run: seconds of steps that save, of steps during a background save, and of all others, with
--async-save and without.

    python -m bench.async_save                # 200M parameters in bf16; some ten minutes on two cores
    python -m bench.async_save --quick        # a tiny model: does it start?

The time of a step is that from its beginning to the next one's, so it includes the wait for a save. Each way runs in a
process of its own, one after the other, on the disk of --folder (default: the folder of temporary files). Figures are
medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import results
from bench.script import parser_of, report
from bench.workload import TUNED, Workload

LARGE = Workload("200M", layers=12, hidden=1024, heads=16, vocabulary=50304, micro_batch=4, micro_batches=2)
TINY = Workload("tiny", layers=2, hidden=64, heads=4, sequence=64, vocabulary=500)
WAYS = {"async": ["--async-save"], "sync": []}
KINDS = ("plain", "saving", "writing")
LIMIT = 1.3
"""The most that a step that saves may take, over a plain step."""


def measured(way: str, work: Workload, saves: int, every: int, folder: Path) -> dict[str, Any]:
    """Seconds of steps by kind, of the parts of a save's wait, and of reading the checkpoint back; and its bytes."""
    from bench.contestants.megazero_ import build_megazero

    os.environ["BENCH_FOLDER"] = str(folder)
    saved = folder / "saved"
    flags = [
        "--save",
        str(saved),
        "--load",
        str(saved),
        "--save-interval",
        str(every),
        "--keep-last-k",
        "1",
        *WAYS[way],
    ]
    job = build_megazero(work, flags)
    parts: dict[str, list[float]] = defaultdict(list)
    told: list[str] = []
    assert job.trainer.save_policy is not None
    job.trainer.save_policy._note = lambda text: told.append(text.replace(str(folder), "FOLDER"))

    def timed(name: str, owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def outer(*args: Any) -> Any:
            began = time.perf_counter()
            result = inner(*args)
            parts[name].append(time.perf_counter() - began)
            return result

        setattr(owner, method, outer)

    timed("probe and record", job.trainer.save_policy, "_record")
    timed("copy" if way == "async" else "write", job.checkpoints, "start" if way == "async" else "save")
    seconds: dict[str, list[float]] = defaultdict(list)
    for step in range(1, saves * every + every):
        writing, began = job.checkpoints.busy, time.perf_counter()
        job.trainer.train_step(stop=False)
        job.trainer.after_step()
        kind = "saving" if step % every == 0 else "writing" if writing else "plain"
        if step > 2:
            seconds[kind].append(time.perf_counter() - began)
    job.checkpoints.wait()
    found = job.checkpoints.find()
    assert found is not None
    loaded = [job.checkpoints.load(found) for _ in range(3)]
    size = sum(file.size for file in found.manifest.files)
    return {
        "seconds": seconds,
        "parts": parts,
        "bytes": size,
        "load_seconds": [one.seconds for one in loaded],
        "told": told,
    }


def in_process(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """`measured` in a process of its own."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        words = [
            sys.executable,
            "-m",
            "bench.async_save",
            "--child",
            way,
            "--folder",
            folder,
            "--saves",
            str(args.saves),
            "--every",
            str(args.every),
            "--samples",
            str(args.samples),
        ]
        done = subprocess.run(
            [*words, *(["--quick"] if args.quick else [])], env=os.environ | TUNED, stdout=subprocess.PIPE, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def normal(seconds: dict[str, list[float]]) -> float:
    """The median of steps without a save; if there are none, of steps during a background save."""
    return statistics.median(seconds.get("plain") or seconds["writing"])


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A row for each way and kind of step, with its ratio to the plain steps of the same process."""
    lines = []
    for way, one in found.items():
        plain = normal(one["seconds"])
        for kind in KINDS:
            times = one["seconds"].get(kind)
            if times:
                median = statistics.median(times)
                lines.append([f"{way}: {kind}", str(len(times)), f"{median:.2f}", f"{median / plain:.2f}"])
        for part, times in one["parts"].items():
            lines.append([f"{way}, of a save: {part}", str(len(times)), f"{statistics.median(times):.2f}", ""])
        loaded = one["load_seconds"]
        lines.append([f"{way}: load", str(len(loaded)), f"{statistics.median(loaded):.2f}", ""])
    return lines


def main() -> None:
    """Print one table and write its numbers to a file; status 1 if the limit is exceeded."""
    parser = parser_of(__doc__)
    parser.add_argument("--saves", type=int, default=5, help="saves of each way")
    parser.add_argument("--every", type=int, default=5, help="steps from save to save")
    parser.add_argument("--samples", type=int, default=LARGE.samples, help="of one step")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--child", choices=tuple(WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = TINY if args.quick else replace(LARGE, micro_batches=args.samples // LARGE.micro_batch)
    if args.child:
        print(json.dumps(measured(args.child, work, args.saves, args.every, args.folder)), flush=True)
        os._exit(0)
    found = {way: in_process(way, args) for way in WAYS}
    text = results.table(("step", "count", "seconds", "of a plain step"), rows(found))
    settings = {"workload": asdict(work), "saves": args.saves, "every": args.every, "limit": LIMIT}
    path = report(args, "async-save", settings, {"ways": found}, text)
    print(f"{text}\n\n{path}", flush=True)
    seconds = found["async"]["seconds"]
    ratio = statistics.median(seconds["saving"]) / normal(seconds)
    print(
        f"a step that saves takes {ratio:.2f} times a plain one; at most {LIMIT}: "
        f"{'met' if ratio <= LIMIT else 'MISSED'}",
        flush=True,
    )
    sys.exit(0 if ratio <= LIMIT or args.quick else 1)


if __name__ == "__main__":
    main()
