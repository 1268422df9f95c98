"""`megazero doctor`: what this machine and installation offer a training step, what is missing, and what that costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser
from megazero.system.words import counted

if TYPE_CHECKING:
    import torch

DESCRIPTION = """
Looks at this machine and installation: torch, processor, kernels, cards, backends, optional packages. A line that
begins with - says what is missing and what that costs, one with ! why megazero cannot run. Kernels that are built at
first use are built now.

Status: 0, or 1 where megazero cannot run.
"""
EXAMPLES = "megazero doctor", "python -m megazero.doctor"
OLDEST_TORCH = (2, 11)
LARGE_PAGES = {
    "always": "for every program (always)",
    "madvise": "for programs that ask, as megazero does (madvise)",
    "never": "for no program (never)",
}
"""Linux's setting -> what it means."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MATRIX_UNITS = {
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


def main(argv: Sequence[str]) -> int:
    command_parser("doctor", DESCRIPTION, EXAMPLES).parse_args(argv)
    return status_of(run)


def run() -> int:
    """Print the findings, and return the status: 1 if one of them is fatal."""
    fatal = False
    for finding in examine():
        mark = "!" if finding.fatal else "-" if finding.advice else " "
        print(f"{mark} {finding.subject:<15}{finding.state}")
        if finding.advice:
            print(f"  {'':<15}{finding.advice}")
        fatal |= finding.fatal
    return int(fatal)


class Finding(NamedTuple):
    """A line of the output. advice: what to do about what is missing, or what it costs. fatal: megazero cannot run."""

    subject: str
    state: str
    advice: str = ""
    fatal: bool = False


def examine() -> Iterator[Finding]:
    """All findings, the most important first."""
    for look in (_torch, _processor, _kernels, _memory, _devices, _backends, _optional):
        yield from look()


def _torch() -> Iterator[Finding]:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = version < OLDEST_TORCH
    oldest = ".".join(map(str, OLDEST_TORCH))
    advice = f"megazero needs {oldest} or newer: pip install 'torch>={oldest}'" if old else ""
    yield Finding("Python", platform.python_version())
    yield Finding("torch", torch.__version__, advice, old)


def _processor() -> Iterator[Finding]:
    import torch

    from fused_ops.native.compile import CompileError, compiler, compiler_version, processor_flags
    from megazero.system import device

    flags = processor_flags()
    units = ", ".join(name for name, flag in MATRIX_UNITS.items() if flag in flags) or "none known"
    fast = {"amx_bf16", "avx512_bf16"} & flags
    advice = "" if fast else "no unit for bf16 products: bf16 saves memory here, but no time"
    cores = counted(len(os.sched_getaffinity(0)), "core")
    yield Finding("processor", f"{device.name(torch.device('cpu'))}, {cores}, {units}", advice)
    try:
        yield Finding("C++ compiler", compiler_version(compiler()))
    except CompileError as error:
        yield Finding("C++ compiler", "none", f"{error}; kernels that are not compiled yet stay so")


def _kernels() -> Iterator[Finding]:
    from fused_ops import registry
    from fused_ops.native import library

    try:
        choice = library.choice()
    except ValueError as error:
        yield Finding("kernels", "unknown", str(error), fatal=True)
        return
    if choice == "reference":
        yield Finding("kernels", "off", "MEGAZERO_FUSED=reference: a step on the CPU takes about twice as long")
        yield Finding("products", registry.product_bodies())
        return
    for name, load in (("kernels", library.cpu_library), ("matrix kernels", library.torch_library)):
        loaded = load(choice)
        missing = "every op runs its plain torch body: a step on the CPU takes about twice as long"
        yield Finding(name, f"{loaded.level}, {loaded.path}" if loaded else "none", "" if loaded else missing)
    layouts = registry.block_products()
    yield Finding("block products", f"torch's, which read a matrix as {layouts}" if layouts else "none in this torch")
    yield Finding("products", registry.product_bodies())
    for product, reason in registry.refusals().items():
        yield Finding(product, "torch's own", f"the kernel is refused: {reason}")
    bodies = registry.describe("cpu")
    plain = [op for op, body in bodies.items() if body == registry.REFERENCE]
    compiled = f"{len(bodies) - len(plain)} of {len(bodies)} have a kernel here"
    yield Finding("ops", compiled, f"plain torch: {', '.join(plain)}" if plain else "")


def _memory() -> Iterator[Finding]:
    import torch

    from megazero.system import allocator, device

    total = device.total_memory_bytes(torch.device("cpu"))
    yield Finding("memory", f"{total / 2**30:.1f} GiB" if total else "unknown")
    try:
        setting = HUGE_PAGES.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        setting = "unknown"
    advice = f"large tensors get small pages; as root: echo madvise > {HUGE_PAGES}" if setting == "never" else ""
    yield Finding("large pages", LARGE_PAGES.get(setting, setting), advice)
    glibc = platform.libc_ver()[0] == "glibc"
    # A run restarts itself with glibc's settings, which this process does not have: `describe` would call them missing.
    advice = "" if glibc else allocator.describe()
    yield Finding("allocator", "a run sets glibc's" if glibc else "the system's own", advice)


def _devices() -> Iterator[Finding]:
    import torch

    from fused_ops import fp8
    from megazero.system import device

    count = device.device_count(torch.device("cuda")) if device.cuda_available() else 0
    if not count:
        yield Finding("CUDA", "no device", "" if torch.version.cuda else "this torch is built without CUDA")
    for index in range(count):
        card = torch.device("cuda", index)
        gibibytes = (device.total_memory_bytes(card) or 0) / 2**30
        yield Finding(f"cuda:{index}", f"{device.name(card)}, {gibibytes:.0f} GiB")
        with suppress(ValueError):  # a wrong MEGAZERO_FUSED, which `_kernels` has reported
            yield _cuda_kernels(index)
    yield from _attention(torch.device("cuda", 0) if count else torch.device("cpu"))
    missing = fp8.unavailable_reason("cuda" if count else "cpu")
    products = "torch's" if count else "torch's, slower here than bf16"
    yield Finding("FP8 products", "none" if missing else products, missing or "")


def _cuda_kernels(index: int) -> Finding:
    """The kernels of a GPU, which are compiled now if they are not compiled yet."""
    from fused_ops.native import library
    from fused_ops.native.compile import NVCC, CompileError, compiler, compiler_version

    choice = library.choice()
    if choice == "reference":
        return Finding("CUDA kernels", "off", "MEGAZERO_FUSED=reference: the ops are torch's own")
    try:
        version = compiler_version(compiler(NVCC))
    except CompileError as error:
        version = str(error)
    loaded = library.cuda_library(choice, index)
    if loaded is None:
        return Finding("CUDA kernels", "none", f"the ops are torch's own: {version}")
    return Finding("CUDA kernels", f"{loaded.level}, {loaded.path}")


def _attention(device: torch.device) -> Iterator[Finding]:
    """The body of attention that a small bf16 run would choose; the choice tries it."""
    import torch

    from fused_ops.attention.reach import Reach
    from fused_ops.attention.selection import choose
    from fused_ops.attention.trial import AttentionWorkload, find_support

    with suppress(ValueError):  # a wrong MEGAZERO_FUSED, which `_kernels` has reported
        small = AttentionWorkload(torch.bfloat16, 256, 1, 4, 1, 64)
        layers = {
            "attention": small,
            "with ALiBi": replace(small, alibi=True),
            "with a window": replace(small, reach=Reach(window=64)),
            "with a cap": replace(small, cap=50.0),
        }
        for name, workload in layers.items():
            chosen = choose(workload.case(device), find_support("auto", workload, device))
            yield Finding(name, f"{chosen.body.value}: {chosen.reason}")


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    from fused_ops.native import library
    from megazero.mpu.shared_memory import lacking

    tests = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    names = [name for name, available in tests.items() if available()]
    advice = "" if "gloo" in names else "several ranks on a CPU need gloo"
    yield Finding("backends", ", ".join(names) or "none", advice, fatal=not names)
    kernels = None
    with suppress(ValueError):  # a wrong MEGAZERO_FUSED, which `_kernels` has reported
        kernels = library.cpu_library(library.choice())
    missing = lacking() or ("" if kernels else "it needs the kernels")
    advice = f"{missing}: collectives of ranks on one host go through gloo, up to ten times slower"
    yield Finding("shared memory", "none" if missing else "between ranks of one host", advice if missing else "")


def _optional() -> Iterator[Finding]:
    from megazero.train.requirements import PACKAGES

    for package in PACKAGES:
        if importlib.util.find_spec(package.name):
            yield Finding(package.name, _version_of(package.name))
        else:
            source = package.source or package.name
            yield Finding(package.name, "not installed", f"only for {package.serves}: pip install {source}")


def _version_of(name: str) -> str:
    """The version of what has the package: mlflow comes as mlflow or as mlflow-skinny."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(importlib.metadata.packages_distributions()[name][0])
