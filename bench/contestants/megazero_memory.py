"""megazero's step, with an account of the resident memory above the imports at the peak of a step."""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.contestants.megazero_ import build_megazero
from bench.workload import Workload
from megazero.train.job import Job

MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO)


def heap_in_use() -> int:
    """Bytes that are allocated from glibc's heaps."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def resident() -> Counter[str]:
    """Resident bytes of this process: the "heap" of brk, mapped "files", "shared" memory, and other "pages"."""
    found, kind = Counter(heap=0, files=0, shared=0, pages=0), "pages"
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            name = rest[4] if len(rest) > 4 else ""
            shared = name.startswith(("/dev/shm", "/memfd"))
            kind = "heap" if name == "[heap]" else "shared" if shared else "files" if name.startswith("/") else "pages"
        elif first in ("Rss:", "Anonymous:"):
            # Pages of a private mapping that the process has written to are anonymous.
            size = int(rest[0]) * 1024
            if kind == "files" and first == "Anonymous:":
                found["files"] -= size
                found["pages"] += size
            elif first == "Rss:":
                found[kind] += size
    return found


def kept_tensors() -> int:
    """Bytes of all tensors that exist now."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def largest(events: list[dict[str, Any]]) -> dict[str, int]:
    """From a trace of torch's profiler: bytes by allocating function, of allocations that were alive at the peak."""
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    calls = [
        event
        for event in events
        if event.get("cat") == "python_function" and event["name"].startswith(("megazero/", "fused_ops/"))
    ]
    alive: dict[int, dict[str, Any]] = {}
    held = most = 0
    then: list[dict[str, Any]] = []
    for change in changes:
        size, address = change["args"]["Bytes"], change["args"]["Addr"]
        if size > 0:
            alive[address] = change
        elif alive.pop(address, None) is None:
            continue  # allocated before the trace began
        held += size
        if held > most:
            most, then = held, list(alive.values())
    found: Counter[str] = Counter()
    for change in then:
        around = [
            call for call in calls if call["tid"] == change["tid"] and 0 <= change["ts"] - call["ts"] <= call["dur"]
        ]
        innermost = max(around, key=lambda call: call["ts"])["name"] if around else "elsewhere"
        found[innermost] += change["args"]["Bytes"]
    return dict(found.most_common())


class Step:
    """One optimizer step. `report` runs one more, and returns the account."""

    def __init__(self, job: Job, imports: Counter[str], heap: int) -> None:
        self.trainer, self.imports, self.heap = job.trainer, imports, heap

    def __call__(self) -> float:
        self.trainer.train_step(stop=False)
        self.trainer.after_step()
        return 0.0

    def report(self) -> dict[str, Any]:
        """MiB above the imports: {"parts": {what: MiB}, whose sum is the resident set, "tensors": {function: MiB}}."""
        now, in_use = resident(), heap_in_use()
        state, kept = self.trainer.state.model.bytes(), kept_tensors()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as traced:
            self()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            traced.export_chrome_trace(file.name)
            tensors = largest(json.loads(Path(file.name).read_text())["traceEvents"])
        grown = {kind: size - self.imports[kind] for kind, size in now.items()}
        heap_grown = in_use - self.heap
        found = {f"model state: {column}": size for column, size in state.items()}
        found |= {
            "tensors kept from step to step (logits, batches)": kept - sum(state.values()),
            "tensors of a step at their largest": sum(tensors.values()),
            "the heap's other contents (matrix library, Python's large objects)": heap_grown - kept,
            "free pages of the heap": grown["heap"] - heap_grown - sum(tensors.values()),
            "pages outside the heap (Python's objects, generated code, stacks)": grown["pages"],
            "shared memory": grown["shared"],
            "files: code and constants that ran": grown["files"],
        }
        return {
            "parts": {k: v / 2**20 for k, v in found.items()},
            "tensors": {k: v / 2**20 for k, v in tensors.items()},
        }


def build(work: Workload, layout: tuple[str, ...] = (), replicas: int = 1) -> Step:
    imports, heap = resident(), heap_in_use()
    return Step(build_megazero(work, list(layout), replicas), imports, heap)
