"""The process of one rank of a contestant. It executes commands that the harness sends over a pipe, and sleeps
otherwise.

    python -m bench.child COMMANDS REPLIES WORKLOAD ENTRY          (two file descriptors, two JSON texts)

A command is one line of JSON, and so is its reply. The harness redirects standard output and error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TextIO

from bench.workload import Entry, Workload, entry_from, workload_from

MIB = 1 << 20


class Unsupported(Exception):
    """The contestant does not have what the workload asks for."""


class Rank:
    """Executes the commands: each is the method of its name."""

    def __init__(self, work: Workload, entry: Entry) -> None:
        self.work, self.entry = work, entry
        self.step: Callable[[], Any] | None = None
        self.imports = 0

    def load(self) -> dict[str, Any]:
        """Import what the contestant needs. Later figures of memory are differences from the memory after this."""
        import torch

        torch.set_num_threads(self.work.threads)
        self.module = importlib.import_module(f"bench.contestants.{self.entry.module}")
        if self.entry.settings.get("compile"):
            importlib.import_module("torch._inductor.compile_fx")
        self.imports = resident("VmRSS")
        return {"versions": versions()}

    def build(self) -> dict[str, Any]:
        """Contestants that know more than bf16 say so in PRECISIONS."""
        if self.work.precision not in getattr(self.module, "PRECISIONS", ("bf16",)):
            raise Unsupported(f"bench.contestants.{self.entry.module} has no {self.work.precision}")
        self.step = self.module.build(self.work, **self.entry.settings)
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Seconds of each of `count` optimizer steps, and the last loss. If the contestant's step has a `finish`, the
        last one's time has what the steps have left to other threads.
        """
        assert self.step is not None
        seconds, loss = [], float("nan")
        finish: Callable[[], None] | None = getattr(self.step, "finish", None)
        for number in range(count):
            began = time.perf_counter()
            loss = float(self.step())  # on a card: once it has been computed
            if finish is not None and number == count - 1:
                finish()
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "loss": loss}

    def turn(self, count: int) -> dict[str, Any]:
        """Seconds of `count` steps together; the device is idle before them and after them."""
        from megazero.system import device as devices

        assert self.step is not None
        device = devices.resolve(self.work.device, 0)
        devices.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            loss = self.step()
        devices.synchronize(device)
        return {"seconds": time.perf_counter() - began, "loss": float(loss)}

    def device_memory(self) -> dict[str, Any]:
        """The peak of tensors' memory on the GPU since the process began, in GiB; on a CPU, of the resident set."""
        from megazero.system import device as devices

        return {"peak_gib": devices.peak_memory_bytes(devices.resolve(self.work.device, 0)) / (1 << 30)}

    def report(self) -> dict[str, Any]:
        """The report of the contestant's step since the last report."""
        assert self.step is not None
        ask: Callable[[], dict[str, Any]] = getattr(self.step, "report", dict)
        return ask()

    def forget_peak(self) -> dict[str, Any]:
        """Reset the peak, after building and compiling. If the kernel forbids it, those count too."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return {"reset": False}
        return {"reset": True}

    def memory(self) -> dict[str, Any]:
        """The peak of the resident set above that after the imports, in MiB."""
        return {"peak": (resident("VmHWM") - self.imports) / MIB, "imports": self.imports / MIB}


def resident(field: str) -> int:
    """The bytes of a field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def versions() -> dict[str, str]:
    """The versions of the libraries that are loaded."""
    names = ("torch", "transformers", "deepspeed", "numpy")
    return {name: str(sys.modules[name].__version__) for name in names if name in sys.modules}


@contextmanager
def caught(replies: TextIO) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        reply = {
            "error": f"{type(error).__name__}: {error}".splitlines()[0][:300],
            "missing": isinstance(error, ImportError | Unsupported),
        }
        print(json.dumps(reply), file=replies, flush=True)


def listen(commands: TextIO, waiting: SimpleQueue[str]) -> None:
    """Put commands into the queue. When the pipe closes, end the process, even during a step that waits for a peer."""
    for line in commands:
        waiting.put(line)
    leave()


def leave() -> None:
    """End the process at once, so that no library waits for its threads or for peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    commands, replies = open(int(sys.argv[1])), open(int(sys.argv[2]), "w")  # noqa: SIM115 - they live as long as the process
    rank, waiting = Rank(workload_from(sys.argv[3]), entry_from(sys.argv[4])), SimpleQueue[str]()
    Thread(target=listen, args=(commands, waiting), daemon=True).start()
    while True:
        command = json.loads(waiting.get())
        with caught(replies):
            reply = getattr(rank, command.pop("do"))(**command)
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
