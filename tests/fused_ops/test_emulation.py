"""What the emulation of a card is there to see: kernels with a fault end the process that runs them, or give another
result.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from fused_ops.native import compile as compiling

HEAD = '#include "launch.h"\n#include "reduce.h"\nusing namespace mz;\n'
FAULTS = {
    "an access that is not aligned": (
        "__global__ void k(float* x) { store<4>(x + 1 + threadIdx.x * 4, load<4>(x + 4)); }",
        "dim3(1), dim3(32)",
    ),
    "threads of a warp wait for others that have ended": (
        "__global__ void k(float* x) { if (threadIdx.x == 3) return; x[threadIdx.x] = over_warp(Floats<1>{{1.0f}}, "
        "Sum())[0]; }",
        "dim3(1), dim3(32)",
    ),
    "threads wait at a barrier for others that have ended": (
        "__global__ void k(float* x) { if (threadIdx.x < 32) __syncthreads(); x[threadIdx.x] = 1.0f; }",
        "dim3(1), dim3(64)",
    ),
    "some threads wait at a barrier and others for their warp": (
        "__global__ void k(float* x) { if (threadIdx.x % 2) __syncthreads(); x[threadIdx.x] = "
        "over_warp(Floats<1>{{1.0f}}, Sum())[0]; }",
        "dim3(1), dim3(32)",
    ),
    "a shuffle in a block that is not made of whole warps": (
        "__global__ void k(float* x) { x[threadIdx.x] = over_warp(Floats<1>{{1.0f}}, Sum())[0]; }",
        "dim3(1), dim3(40)",
    ),
}
RUN = "import ctypes, sys; x = (ctypes.c_float * 4096)(); ctypes.CDLL(sys.argv[1]).run(x, 0)"


def library(folder: Path, kernel: str, geometry: str) -> Path:
    call = f'extern "C" int run(float* x) {{ return launch(Launch{{}}, k, {geometry}, x); }}\n'
    source, made = folder / "case.cu", folder / "case.so"
    source.write_text(f"{HEAD}{kernel}\n{call}")
    words = [
        compiling.compiler(),
        *compiling.EMULATION_FLAGS,
        "-fvisibility=default",
        f"-I{compiling.SOURCES / 'cuda'}",
        "-shared",
    ]
    subprocess.run([*words, str(source), "-o", str(made)], check=True, capture_output=True)
    return made


@pytest.fixture(autouse=True)
def needs_a_compiler():
    try:
        compiling.compiler()
    except compiling.CompileError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_process(tmp_path, fault):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library(tmp_path, *FAULTS[fault]))], capture_output=True, text=True, check=False
    )
    assert done.returncode < 0 and fault in done.stderr


@pytest.mark.parametrize("barrier", ["__syncthreads();", ""])
def test_a_missing_barrier_shows(tmp_path, barrier):
    """Each thread takes what its neighbour has put down, around the block: in every order of the threads somebody comes
    too early.
    """
    kernel = (
        "__global__ void k(float* x) { __shared__ float held[64]; held[threadIdx.x] = -1.0f; __syncthreads(); "
        f"held[threadIdx.x] = threadIdx.x; {barrier} x[blockIdx.x * 64 + threadIdx.x] = held[(threadIdx.x + 1) % 64]; "
        f"__syncthreads(); }}"
    )
    x = (ctypes.c_float * 4096)()
    assert ctypes.CDLL(str(library(tmp_path, kernel, "dim3(6), dim3(64)"))).run(x) == 0
    right = [(i + 1) % 64 for i in range(64)]
    assert all((list(x[block * 64 : block * 64 + 64]) == right) == bool(barrier) for block in range(6))
