"""Models that are larger than the memory, trained within a limit that the kernel keeps, and exported.

    python -m bench.demonstration --folder /mnt/nvme              # 1.0 billion parameters in 6 GB
    python -m bench.demonstration --folder /mnt/nvme --only 3b    # BLOOM-3b's shape in 10 GB; 60 GB of disk
    python -m bench.demonstration --folder /mnt/nvme --beside 22  # and the same run in 22 GB of memory
    python -m bench.demonstration --quick                         # a tiny model: does it start?

All of the model state rests on disks: parameters, gradients, master weights, moments. At the end the weights are saved,
beside the swap files, and then converted to a Hugging Face folder. The same run without disks has to be refused before
it starts. All of them are the program as a user starts it, in a control group of its own. Needs Linux and the right to
make control groups.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import results
from bench.contestants.megazero_ import flags_of, write_words
from bench.held import Held, disk_bytes, run_held
from bench.recorded import PARTS
from bench.script import parser_of, report
from bench.workload import Workload
from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.rank_state import stage_bytes
from megazero.plan.step_memory import run_peaks

GB = 10**9
REPOSITORY = Path(__file__).resolve().parents[1]
OFF = ("--offload-params", "nvme", "--offload-gradients", "nvme", "--late-update")


@dataclass(frozen=True)
class Demonstration:
    """A model, the bytes of memory and of disk that the whole job may have, and how it is cut.

    optimizer  --offload-optimizer of the run on disks
    """

    work: Workload
    limit: int
    disk: int
    steps: int
    flags: tuple[str, ...] = ()
    optimizer: str = "nvme"

    @property
    def off(self) -> tuple[str, ...]:
        """The flags that move the model state to disks."""
        return ("--offload-optimizer", self.optimizer, *OFF)


BILLION = Workload(
    "1b", layers=20, hidden=2048, heads=16, sequence=256, vocabulary=8192, micro_batch=1, micro_batches=4
)
BLOOM_3B = Workload(
    "3b", layers=30, hidden=2560, heads=32, sequence=256, vocabulary=250880, micro_batch=1, micro_batches=1
)
BLOOMS = ("--position-embedding", "alibi", "--embedding-layernorm", "--activation", "gelu-tanh")
NEARLY_ALL = "nvme:0.97"
"""Of BLOOM-3b's optimizer state: 54.05 GB of swap files and 6.01 GB of saved weights are just above 60 GB."""
DEMONSTRATIONS = (
    Demonstration(BILLION, 6 * GB, 25 * GB, 4),
    Demonstration(BLOOM_3B, 10 * GB, 60 * GB, 2, BLOOMS, NEARLY_ALL),
)
TINY = Demonstration(
    Workload("tiny", layers=4, hidden=1024, heads=4, sequence=64, vocabulary=512, micro_batch=1),
    limit=8 * GB // 10,
    disk=2 * GB,
    steps=2,
)


def command(shown: Demonstration, folder: Path, off: bool) -> list[str]:
    """The run's command line, with its state on disks or not."""
    where = [*shown.off, "--nvme-path", str(folder)] if off else []
    words = flags_of(shown.work, folder, 1)
    words[words.index("--train-iters") + 1] = str(shown.steps)
    return [*words, *shown.flags, "--zero-stage", "3", *where]


def predicted(shown: Demonstration, folder: Path) -> dict[str, int]:
    """Parameters, and bytes by tier at the peak, by the arithmetic of the program."""
    run = parse_run(command(shown, folder, off=True), 1)
    axes = axes_of(run, 1)
    (peaks,), (state,) = run_peaks(run, axes, "cpu"), stage_bytes(run, axes)
    return {
        "parameters": state.parameters,
        "device": peaks.device_bytes,
        "host": peaks.host_bytes,
        "disk": peaks.disk,
    }


def train(shown: Demonstration, folder: Path, off: bool) -> tuple[Held, list[dict[str, Any]]]:
    """The run within its limit, and its metrics with the parts of each step."""
    metrics, split, saved = folder / f"metrics-{off}.jsonl", folder / "split.json", folder / f"saved-{off}"
    outputs = ["--metrics-file", str(metrics), "--save", str(saved), "--no-save-optim"]
    words = ["bench.recorded", str(split), "pretrain", *command(shown, folder, off), *outputs]
    held = run_held([sys.executable, "-m", *words], shown.limit, REPOSITORY, folder)
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    parts = json.loads(split.read_text()) if split.exists() else [{} for _ in lines]
    return held, [json.loads(line) | {"parts": found} for line, found in zip(lines, parts, strict=True)]


def export(shown: Demonstration, folder: Path) -> Held:
    """The saved weights as a Hugging Face folder."""
    words = ["--input", str(folder / "saved-True"), "--to", "hf", "--output", str(folder / "hf")]
    return run_held([sys.executable, "-m", "megazero", "convert", *words], shown.limit, REPOSITORY, folder)


def demonstrate(shown: Demonstration, folder: Path) -> dict[str, Any]:
    """Both runs, and what was predicted of the one that trains."""
    write_words(shown.work, folder)
    refused, none = train(shown, folder, off=False)
    print(f"{shown.work.name} without: status {refused.status} after {refused.seconds:.0f} s", flush=True)
    trained, steps = train(shown, folder, off=True)
    print(f"{shown.work.name} on disks: status {trained.status} after {trained.seconds:.0f} s", flush=True)
    if trained.status:
        print(trained.text)
    exported = export(shown, folder)
    print(f"{shown.work.name} exported: status {exported.status} after {exported.seconds:.0f} s", flush=True)
    return {
        "limit": shown.limit,
        "disk": shown.disk,
        "predicted": predicted(shown, folder),
        "without": asdict(refused) | {"steps": none},
        "on_disks": asdict(trained) | {"steps": steps},
        "exported": asdict(exported) | {"bytes": disk_bytes(folder / "hf")},
    }


def beside_memory(shown: Demonstration, folder: Path, limit: int, turns: int = 2) -> list[list[float]]:
    """Seconds of a step with the state in `limit` bytes of memory, and on disks within the limit of `shown`, in turns:
    the mean of all steps but the first, which has no updates of a step before it.
    """
    seconds = []
    for _ in range(turns):
        turn = []
        for case, off in ((replace(shown, limit=limit), False), (shown, True)):
            held, steps = train(case, folder, off)
            if held.status:
                raise SystemExit(f"status {held.status}: {held.text}")
            turn.append(statistics.mean(step["step_seconds"] for step in steps[1:]))
        seconds.append(turn)
        print(f"{shown.work.name}: in memory {seconds[-1][0]:.1f} s, on disks {seconds[-1][1]:.1f} s", flush=True)
    return seconds


def rows(name: str, found: dict[str, Any]) -> list[list[str]]:
    said, done, without, exported = (found[name] for name in ("predicted", "on_disks", "without", "exported"))
    seconds = [step["step_seconds"] for step in done["steps"]]
    model = f"{said['device'] / GB:.2f} GB on the device, {said['host'] / GB:.2f} GB of host memory"
    return [
        ["model", f"{name}: {said['parameters']:,} parameters"],
        ["memory of the whole job", f"{found['limit'] / GB:.1f} GB"],
        [
            "without offload",
            f"status {without['status']} after {without['seconds']:.0f} s, {len(without['steps'])} steps",
        ],
        ["on disks", f"status {done['status']} after {done['seconds']:.0f} s, {done['killed']} killed"],
        ["most resident", f"{done['resident'] / GB:.2f} GB of {found['limit'] / GB:.1f}"],
        ["predicted of the model", model],
        ["most on disk", f"{done['disk'] / GB:.2f} GB of {found['disk'] / GB:.1f}"],
        ["predicted of the swap files", f"{said['disk'] / GB:.2f} GB"],
        ["exported", f"status {exported['status']} after {exported['seconds']:.0f} s, {exported['bytes'] / GB:.2f} GB"],
        ["most of the export", f"{exported['resident'] / GB:.2f} GB resident, {exported['disk'] / GB:.2f} GB on disk"],
        ["losses", ", ".join(f"{step['loss']:.4f}" for step in done["steps"])],
        ["seconds of a step", ", ".join(f"{second:.1f}" for second in seconds)],
        ["their median", f"{statistics.median(seconds):.1f}" if seconds else "-"],
        *(
            [f"of them {part}", ", ".join(f"{step['parts'][part]:.1f}" for step in done["steps"])]
            for part in PARTS
            if done["steps"]
        ),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    names = [shown.work.name for shown in DEMONSTRATIONS]
    parser.add_argument("--only", choices=names, default="1b", help="%(default)s")
    parser.add_argument("--folder", type=Path, help="for swap files: an empty folder is made there and removed")
    parser.add_argument("--beside", type=int, metavar="GB", help="of memory in which the run without disks fits")
    args = parser.parse_args()
    shown = next(shown for shown in DEMONSTRATIONS if shown.work.name == args.only)
    shown = TINY if args.quick else shown
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="megazero-demonstration-") as folder:
        found = demonstrate(shown, Path(folder))
        beside = beside_memory(shown, Path(folder), args.beside * GB) if args.beside else []
    settings = {"work": asdict(shown.work), "flags": [*shown.off, *shown.flags]}
    text = f"{results.table(('what', 'found'), rows(shown.work.name, found))}\n\n{found['without']['text']}"
    if beside:
        found["beside_memory"] = beside
        ratio = statistics.median(on_disks / in_memory for in_memory, on_disks in beside)
        text += f"\n\non disks: {ratio:.2f} times the seconds of a step in memory, median of {len(beside)} turns"
    path = report(args, f"demonstration-{shown.work.name}", settings, found, text)
    print(text, path, sep="\n\n")


if __name__ == "__main__":
    main()
