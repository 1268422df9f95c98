"""Races of emulated CUDA kernels are found, by every access to memory being seen (`accesses.cpp`): planted ones, and
those that a missing barrier of ours makes. That no kernel of ours has one is in `test_emulated_bytes.py`, which looks
at the same runs for what they move.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fused_ops.native import compile as compiling
from fused_ops.native import library
from tests.fused_ops.watched import Record, watched_sources, watching
from tests.gpu import sanitize
from tests.gpu.sanitize import Draw
from tests.tables import rows

pytestmark = pytest.mark.slow
FOLDER = compiling.SOURCES / "cuda"


@pytest.fixture(autouse=True, scope="module")
def needs_a_compiler() -> None:
    try:
        compiling.compiler()
    except compiling.CompileError as error:
        pytest.skip(str(error))


BLOCKS, THREADS = 3, 64
PLANTED = {
    name: (body, told)
    for name, body, told in rows("""
nothing between write and read | held[t] = 1; x[i] = held[t ^ 1]; | between, what another wrote in shared
a barrier between write and read | held[t] = 1; __syncthreads(); x[i] = held[t ^ 1]; |
nothing between read and write | held[t] = 1; __syncthreads(); x[i] = held[t ^ 1]; held[t] = 2; |
    a thread writes, without a barrier between, what another read in shared
a barrier between read and write | held[t] = 1; __syncthreads(); x[i] = held[t ^ 1]; __syncthreads(); held[t] = 2; |
many readers, one of another warp | held[t] = 1; __syncthreads(); x[i] = held[0]; if (t < 32) __syncwarp(); if (t == 0)
    held[0] = 2; | a thread writes, without a barrier between, what another read in shared
two writers | held[t / 2] = t; x[i] = held[t / 2]; | two threads write, without a barrier between, the same shared
two writers of neighbouring bytes | ((char*)held)[t] = 1; x[i] = ((char*)held)[t]; |
a shuffle between write and read | held[t] = 1; float y = __shfl_xor_sync(WHOLE_WARP, 1.0f, 1); x[i] = held[t ^ 1] + y;
    | between, what another wrote in shared
a barrier of the warp between write and read | held[t] = 1; __syncwarp(); x[i] = held[t ^ 1]; |
a barrier of the warp between two warps | held[t] = 1; __syncwarp(); x[i] = held[t ^ 32]; |
    between, what another wrote in shared
left by the block before | if (blockIdx.x == 0) held[t] = 1; x[i] = held[t]; | none of its block has written
two blocks write | x[t] = 1; | two blocks write the same global memory
two of three blocks write the same half of a word | ((short*)x)[2 * t + blockIdx.x % 2] = 1; |
    two blocks write the same
two blocks write halves of a word | if (blockIdx.x < 2) ((short*)x)[2 * t + blockIdx.x] = 1; |
two blocks read | x[THREADS + i] = x[t]; |
a block reads what another writes | x[i] = x[(i + THREADS) % (BLOCKS * THREADS)]; | a block
nothing between two threads in global memory | x[i] = 1; x[i ^ 1] += 1; | between,
a barrier between two threads in global memory | x[i] = 1; __syncthreads(); x[i ^ 1] += 1; |
""")
}
"""What a kernel does, t being its thread and i a place of its own, and how its fault is told; empty: it has none."""


def planted_source() -> str:
    lines = ['#include "launch.h"', "using namespace mz;", f"constexpr int BLOCKS = {BLOCKS}, THREADS = {THREADS};"]
    for number, (body, _) in enumerate(PLANTED.values()):
        lines.append(f"static __global__ void kernel_{number}(float* x) {{")
        lines.append("  __shared__ float held[THREADS]; int t = threadIdx.x, i = blockIdx.x * THREADS + t;")
        lines.append(f"  (void)held, (void)i; {body}\n}}")
        lines.append(f"MZ_API int run_{number}(Launch* to, float* x) {{")
        lines.append(f"  return launch(*to, kernel_{number}, dim3(BLOCKS), dim3(THREADS), x);\n}}")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """What is found in each of the kernels above, compiled together."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.cu").write_text(planted_source())
    kernels, found = watched_sources(folder), {}
    for number, name in enumerate(PLANTED):
        with watching(kernels) as found[name]:
            kernels.call(f"run_{number}", torch.zeros(2 * BLOCKS * THREADS))
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found(planted, name):
    said = PLANTED[name][1]
    assert bool(planted[name].faults) == bool(said), planted[name].faults
    assert not said or any(said in fault for fault in planted[name].faults), planted[name].faults


def test_launches_are_ordered(tmp_path):
    """The second reads what other blocks of the first have written."""
    (tmp_path / "twice.cu").write_text(
        '#include "launch.h"\nusing namespace mz;\n'
        "static __global__ void k(float* x, int from, int to) { x[to + blockIdx.x] = x[from + 3 - blockIdx.x] + 1; }\n"
        "MZ_API int run(Launch* to, float* x) {\n"
        "  int error = launch(*to, k, dim3(4), dim3(1), x, 0, 4);\n"
        "  return error ? error : launch(*to, k, dim3(4), dim3(1), x, 4, 0);\n}\n"
    )
    kernels, x = watched_sources(tmp_path), torch.zeros(8)
    with watching(kernels) as record:
        kernels.call("run", x)
    assert len(record.calls[0].kernels) == 2 and record.faults == []
    assert x.tolist() == [2.0] * 4 + [1.0] * 4


Sweep = tuple[tuple[str, ...], Callable[[Draw], None]]
USERS: dict[str, tuple[Sweep, ...]] = {
    "reduce.h": (
        (("cross_entropy.cu",), sanitize.losses),
        (("sum_of_squares.cu", "column_sums.cu"), sanitize.sums),
        (("norm.cu",), sanitize.norms),
    ),
    "columns.h": ((("sum_of_squares.cu", "column_sums.cu"), sanitize.sums), (("norm.cu",), sanitize.norms)),
    "fp8.cu": ((("fp8.cu",), sanitize.copies),),
}
"""File with barriers -> sources that use it, with what runs them."""
BARRIER = re.compile(r"__sync(threads|warp)\(\);")
BARRIERS = [
    (path.name, number)
    for path in sorted([*FOLDER.glob("*.cu"), *FOLDER.glob("*.h")])
    if path.name != "emulation.h"
    for number in range(len(BARRIER.findall(path.read_text())))
]


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize(("file", "number"), BARRIERS)
def test_every_barrier_is_needed(tmp_path, monkeypatch, file, number):
    """Without it there is a race in one of the kernels that have it."""
    monkeypatch.setenv("MEGAZERO_FUSED", library.EMULATED)
    found = (without(tmp_path / str(i), file, number, sweep, monkeypatch) for i, sweep in enumerate(USERS[file]))
    assert any("without a barrier" in fault for faults in found for fault in faults), "nothing shows that it is missing"


def without(folder: Path, file: str, number: int, sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is found in a sweep when one barrier of a file is missing."""
    sources, part = sweep
    folder.mkdir()
    for path in [*FOLDER.glob("*.h"), *(FOLDER / name for name in {*sources, "runtime.cu"})]:
        shutil.copy(path, folder)
    text = (folder / file).read_text()
    place = list(BARRIER.finditer(text))[number]
    (folder / file).write_text(text[: place.start()] + text[place.end() :])
    kernels = watched_sources(folder)
    monkeypatch.setattr(library, "cpu_library", lambda asked: kernels)
    with watching(kernels) as record:
        for offset in (0, 1):
            part(Draw(torch.device("cpu"), torch.bfloat16, offset))
    return record.faults
