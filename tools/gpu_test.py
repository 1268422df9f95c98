"""All tests that need an NVIDIA GPU, on this machine's GPU and with its torch: `make gpu-test`.

    python -m tools.gpu_test                # everything, in at most eight minutes
    python -m tools.gpu_test --only ranks   # stages whose name contains this
    python -m tools.gpu_test --logs DIR     # keep what each stage printed

Stages that need the GPU for themselves run alone; the others run in parallel. The stages that are most likely to fail
come first, and the output of a failed stage is printed at once. Status 0: everything passed; 1: something failed, or
there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bench import card

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 465
"""The time limit of all stages together. The rest of eight minutes is for the start and the summary."""
GRACE = 15
"""Seconds that a stage out of time has, after an interrupt, to tell what failed so far."""
SILENT = 120
"""Seconds of one test after which the stacks of its threads are printed."""
FOUND = 99
"""The status with which the sanitizer reports a finding."""


@dataclass(frozen=True)
class Stage:
    """A command that is a test. seconds: its time limit. sanitizer: whether it runs under the sanitizer, which sets the
    status.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    environment: dict[str, str] = field(default_factory=dict)
    sanitizer: bool = False


def pytest_stage(name: str, seconds: int, *words: str, workers: int = 0) -> Stage:
    """A stage that runs pytest. workers: number of processes, if pytest-xdist is installed."""
    spread = ("-n", str(workers)) if workers and find_spec("xdist") else ()
    options = ("-m", "gpu", "-q", "-ra", "--tb=short", "--durations=5", "-p", "no:benchmark")
    stacks = ("-o", f"faulthandler_timeout={SILENT}")
    # pytest's last lines name the reason of each failure where it fits into the terminal's width.
    return Stage(
        name, (sys.executable, "-m", "pytest", *options, *stacks, *spread, *words), seconds, {"COLUMNS": "300"}
    )


def sanitizer() -> str | None:
    """The path of NVIDIA's compute-sanitizer; None if it is not installed."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitized(program: str, tool: str) -> Stage:
    """A stage that runs every kernel under a tool of the sanitizer.

    torch's caching allocator is off, so that each tensor is an allocation, whose bounds the sanitizer knows.
    """
    options = ("--error-exitcode", str(FOUND), "--report-api-errors", "no")
    command = (program, "--tool", tool, *options, sys.executable, "-m", "tests.gpu.sanitize")
    return Stage(tool, command, 100, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, sanitizer=True)


def phases() -> Iterator[tuple[Stage, ...]]:
    """The phases in order. The stages of one phase run in parallel."""
    rooms = {
        "ranks": ("tests/gpu/test_training.py", 3),
        "parity": ("tests/gpu/test_parity.py", 0),
        "attention": ("tests/gpu/test_attention.py", 3),
        "fp8": ("tests/gpu/test_fp8.py", 2),
        "graphs": ("tests/gpu/test_graphs.py", 0),
    }
    yield (Stage("every kernel once", (sys.executable, "-m", "tests.gpu.sanitize"), 150),)
    kernels = pytest_stage("kernels", 240, "tests/fused_ops", workers=4)
    yield kernels, *(pytest_stage(name, 300, path, workers=workers) for name, (path, workers) in rooms.items())
    yield (pytest_stage("steps", 240, "tests/gpu", *(f"--ignore={path}" for path, _ in rooms.values())),)
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is not installed here: memcheck and racecheck are left out", flush=True)
    else:
        yield (sanitized(program, "memcheck"), sanitized(program, "racecheck"))


@dataclass
class Running:
    """A stage that has been started. `finish` waits for it."""

    stage: Stage
    process: subprocess.Popen[bytes]
    log: Path
    began: float

    @classmethod
    def start(cls, stage: Stage, folder: Path) -> Running:
        log = folder / f"{stage.name.replace(' ', '-')}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            **stage.environment,
        }
        with log.open("wb") as sink:
            process = subprocess.Popen(
                stage.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        return cls(stage, process, log, time.monotonic())

    def finish(self, deadline: float) -> Result:
        limit = min(deadline, self.began + self.stage.seconds)
        try:
            status: int | None = self.process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
            stop(self.process)
        output = self.log.read_text(errors="replace")
        return Result(
            self.stage, judged(self.stage, status, output), last_line(output), time.monotonic() - self.began, output
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a stage, so that pytest prints what failed, then kill it and all processes of its session."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True)
class Result:
    """verdict: passed, failed, out of time, or left out."""

    stage: Stage
    verdict: str
    words: str
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        return self.verdict in ("FAILED", "OUT OF TIME")

    def __str__(self) -> str:
        return f"{self.verdict:<12}{self.stage.name:<20}{self.seconds:5.0f} s   {self.words}"


def judged(stage: Stage, status: int | None, output: str) -> str:
    """The verdict on a stage; "left out" if the sanitizer cannot work on this machine (its driver, a container)."""
    if status is None:
        return "OUT OF TIME"
    if stage.sanitizer and status != FOUND and re.search(r"(?m)^=+ .*(not supported|Unable to|Internal)", output):
        return "left out"
    if (
        stage.sanitizer
        and status == 0
        and not re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", output)
    ):
        return "FAILED"
    return "passed" if status == 0 else "FAILED"


def last_line(output: str) -> str:
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
    return lines[-1][:150] if lines else "it printed nothing"


def run(stages: Sequence[Stage], folder: Path, deadline: float) -> list[Result]:
    """Run stages in parallel. A result is printed as soon as all results before it are."""
    results = []
    for running in [Running.start(stage, folder) for stage in stages]:
        result = running.finish(deadline)
        results.append(result)
        print(result, flush=True)
        if result.failed:
            print("\n".join(f"    {line}" for line in result.output.splitlines()[-80:]), flush=True)
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="stages whose name contains this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (%(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for what the stages print")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    missing = card.why_not()
    if missing is not None:
        sys.exit(f"make gpu-test: {missing}; nothing was tested")
    if find_spec("pytest") is None:
        sys.exit(f"make gpu-test: {sys.executable} has no pytest; nothing was tested")
    began = time.monotonic()
    print(", ".join(f"{name} {value}" for name, value in card.facts().items()), flush=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as spare:
        folder = args.logs or Path(spare)
        folder.mkdir(parents=True, exist_ok=True)
        for stages in phases():
            results += run([stage for stage in stages if args.only in stage.name], folder, began + args.seconds)
    failed = [result.stage.name for result in results if result.failed]
    print(f"\n{len(results)} stages in {time.monotonic() - began:.0f} s")
    print("\n".join(map(str, results)))
    sys.exit(f"make gpu-test: failed: {', '.join(failed)}" if failed or not results else 0)


if __name__ == "__main__":
    main()
