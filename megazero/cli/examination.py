"""What `megazero doctor` does: it lists what this machine and installation offer a training step, what is missing, and
what that costs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from fused_ops import fp8, registry
from fused_ops.attention.selection import choose
from fused_ops.attention.trial import AttentionWorkload, find_support
from fused_ops.native import compile as compiling
from fused_ops.native import library
from megazero.mpu.shared_memory import lacking
from megazero.system import allocator
from megazero.system import device as devices
from megazero.system.words import counted
from megazero.train.requirements import PACKAGES

OLDEST_TORCH = (2, 11)
LARGE_PAGES = {
    "always": "for every program (always)",
    "madvise": "for programs that ask, as megazero does (madvise)",
    "never": "for no program (never)",
}
"""Linux's setting -> what it means."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
UNITS = {
    "AMX": "amx_bf16",
    "AMX FP16": "amx_fp16",
    "AVX-512 FP16": "avx512_fp16",
    "AVX-512 BF16": "avx512_bf16",
    "AVX-512": "avx512f",
    "AVX2": "avx2",
}
"""Units of the processor for matrix products, and Linux's names for them. They determine which block products torch
has, and the layout of their operands.
"""


class Finding(NamedTuple):
    """One line of the output.

    what    the subject
    found   what this machine has
    advice  if something is missing: what to do, or what it costs
    fatal   whether megazero cannot run
    """

    what: str
    found: str
    advice: str = ""
    fatal: bool = False


def examine() -> Iterator[Finding]:
    """All findings, the most important first."""
    for look in (_torch, _processor, _compiler, _kernels, _memory, _devices, _backends, _optional):
        yield from look()


def _torch() -> Iterator[Finding]:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = version < OLDEST_TORCH
    wanted = ".".join(map(str, OLDEST_TORCH))
    yield Finding("Python", platform.python_version())
    yield Finding(
        "torch",
        torch.__version__,
        f"megazero needs {wanted} or newer: pip install 'torch>={wanted}'" if old else "",
        old,
    )


def _processor() -> Iterator[Finding]:
    flags = compiling.processor_flags()
    units = [name for name, flag in UNITS.items() if flag in flags]
    slow = (
        "" if {"amx_bf16", "avx512_bf16"} & flags else "no unit for bf16 products: bf16 saves memory here, but no time"
    )
    yield Finding(
        "processor",
        f"{devices.name(torch.device('cpu'))}, {counted(len(os.sched_getaffinity(0)), 'core')}, "
        f"{', '.join(units) or 'none known'}",
        slow,
    )


def _compiler() -> Iterator[Finding]:
    try:
        yield Finding("C++ compiler", compiling.compiler_version(compiling.compiler()))
    except compiling.CompileError as error:
        yield Finding("C++ compiler", "none", f"{error}; kernels that are not compiled yet stay so")


def _kernels() -> Iterator[Finding]:
    try:
        asked = library.choice()
    except ValueError as error:
        yield Finding("kernels", "unknown", str(error), fatal=True)
        return
    if asked == "reference":
        yield Finding("kernels", "off", "MEGAZERO_FUSED=reference: a step on the CPU takes about twice as long")
        yield Finding("products", registry.product_bodies())
        return
    for name, load in (("kernels", library.cpu_library), ("matrix kernels", library.torch_library)):
        found = load(asked)
        missing = "every op runs its plain torch body: a step on the CPU takes about twice as long"
        yield Finding(name, f"{found.level}, {found.path}" if found else "none", "" if found else missing)
    layouts = registry.block_products()
    yield Finding("block products", f"torch's, which read a matrix as {layouts}" if layouts else "none in this torch")
    yield Finding("products", registry.product_bodies())
    for what, why in registry.refusals().items():
        yield Finding(what, "torch's own", f"the kernel is refused: {why}")
    bodies = registry.describe("cpu")
    plain = [op for op, body in bodies.items() if body == registry.REFERENCE]
    yield Finding(
        "ops",
        f"{len(bodies) - len(plain)} of {len(bodies)} have a kernel here",
        f"plain torch: {', '.join(plain)}" if plain else "",
    )


def _memory() -> Iterator[Finding]:
    total = devices.total_memory_bytes(torch.device("cpu"))
    yield Finding("memory", f"{total / 2**30:.1f} GiB" if total else "unknown")
    try:
        state = HUGE_PAGES.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        state = "unknown"
    advice = f"large tensors get small pages; as root: echo madvise > {HUGE_PAGES}" if state == "never" else ""
    yield Finding("large pages", LARGE_PAGES.get(state, state), advice)
    glibc = platform.libc_ver()[0] == "glibc"
    yield Finding(
        "allocator",
        "a run sets glibc's" if glibc else "the system's own",
        allocator.describe() if not glibc else "",
    )


def _devices() -> Iterator[Finding]:
    cards = devices.device_count(torch.device("cuda")) if devices.cuda_available() else 0
    if not cards:
        yield Finding("CUDA", "no device", "" if torch.version.cuda else "this torch is built without CUDA")
    for index in range(cards):
        card = torch.device("cuda", index)
        yield Finding(
            f"cuda:{index}", f"{devices.name(card)}, {(devices.total_memory_bytes(card) or 0) / 2**30:.0f} GiB"
        )
        with suppress(ValueError):  # MEGAZERO_FUSED, which has been told
            yield _cuda_kernels(index)
    yield from _attention(torch.device("cuda", 0) if cards else torch.device("cpu"))
    missing = fp8.unavailable_reason("cuda" if cards else "cpu")
    yield Finding(
        "FP8 products", "none" if missing else "torch's" if cards else "torch's, slower here than bf16", missing or ""
    )


def _cuda_kernels(index: int) -> Finding:
    """The kernels of a GPU, which are compiled now if they are not compiled yet."""
    asked = library.choice()
    if asked == "reference":
        return Finding("CUDA kernels", "off", "MEGAZERO_FUSED=reference: the ops are torch's own")
    try:
        compiler = compiling.compiler_version(compiling.compiler(compiling.NVCC))
    except compiling.CompileError as error:
        compiler = str(error)
    found = library.cuda_library(asked, index)
    return Finding(
        "CUDA kernels",
        f"{found.level}, {found.path}" if found else "none",
        "" if found else f"the ops are torch's own: {compiler}",
    )


def _attention(device: torch.device) -> Iterator[Finding]:
    """The body of attention that a small bf16 run would choose; the choice tries it."""
    with suppress(ValueError):  # MEGAZERO_FUSED, which has been told
        for name, alibi in (("attention", False), ("with ALiBi", True)):
            workload = AttentionWorkload(torch.bfloat16, 256, 1, 4, 1, 64, alibi=alibi)
            found = choose(workload.case(device), find_support("auto", workload, device))
            yield Finding(name, f"{found.body.value}: {found.reason}")


def _backends() -> Iterator[Finding]:
    tests: dict[str, Callable[[], bool]] = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    there = [name for name, test in tests.items() if test()]
    yield Finding(
        "backends", ", ".join(there) or "none", "" if "gloo" in there else "several ranks on a CPU need gloo", not there
    )
    missing = lacking() or ("" if _has_kernels() else "it needs the kernels")
    advice = f"{missing}: collectives of ranks on one host go through gloo, up to ten times slower"
    yield Finding("shared memory", "none" if missing else "between ranks of one host", advice if missing else "")


def _has_kernels() -> bool:
    with suppress(ValueError):
        return library.cpu_library(library.choice()) is not None
    return False


def _optional() -> Iterator[Finding]:
    for package in PACKAGES:
        if importlib.util.find_spec(package.name):
            yield Finding(package.name, importlib.metadata.version(package.name))
        else:
            yield Finding(package.name, "not installed", f"only for {package.serves}: pip install {package.name}")


def run() -> int:
    """Print the findings, and return the status: 1 if one of them is fatal."""
    fatal = False
    for finding in examine():
        mark = "!" if finding.fatal else "-" if finding.advice else " "
        print(f"{mark} {finding.what:<15}{finding.found}")
        if finding.advice:
            print(f"  {'':<15}{finding.advice}")
        fatal |= finding.fatal
    return int(fatal)
