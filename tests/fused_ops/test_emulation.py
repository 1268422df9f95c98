"""What the emulation of a card is there to see: kernels with a fault end the process that runs them, or give another
result.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from fused_ops.native import compile as compiling
from tests.tables import rows

HEAD = '#include "launch.h"\n#include "reduce.h"\nusing namespace mz;\n'
FAULTS = {
    name: (kernel, size)
    for name, kernel, size in rows("""
an access that is not aligned | __global__ void k(float* x) { store<4>(x + 1 + threadIdx.x * 4, load<4>(x + 4)); } |
    dim3(1), dim3(32)
threads of a warp wait for others that have ended | __global__ void k(float* x) { if (threadIdx.x == 3) return;
    x[threadIdx.x] = over_warp(Floats<1>{{1.0f}}, Sum())[0]; } | dim3(1), dim3(32)
threads wait at a barrier for others that have ended |
    __global__ void k(float* x) { if (threadIdx.x < 32) __syncthreads(); x[threadIdx.x] = 1.0f; } | dim3(1), dim3(64)
some threads wait at a barrier and others for their warp | __global__ void k(float* x) { if (threadIdx.x % 2)
    __syncthreads(); x[threadIdx.x] = over_warp(Floats<1>{{1.0f}}, Sum())[0]; } | dim3(1), dim3(32)
a shuffle in a block that is not made of whole warps |
    __global__ void k(float* x) { x[threadIdx.x] = over_warp(Floats<1>{{1.0f}}, Sum())[0]; } | dim3(1), dim3(40)
""")
}
BARRIER = (
    "__global__ void k(float* x) {{ __shared__ float held[64]; held[threadIdx.x] = -1.0f; __syncthreads(); "
    "held[threadIdx.x] = threadIdx.x; {} x[blockIdx.x * 64 + threadIdx.x] = held[(threadIdx.x + 1) % 64]; "
    "__syncthreads(); }}"
)
BARRIERS = {True: BARRIER.format("__syncthreads();"), False: BARRIER.format("")}
CASES = FAULTS | {barrier: (kernel, "dim3(6), dim3(64)") for barrier, kernel in BARRIERS.items()}
RUN = "import ctypes, sys; x = (ctypes.c_float * 4096)(); ctypes.CDLL(sys.argv[1])[sys.argv[2]](x, 0)"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kernels in one, with a function for each."""
    try:
        compiler = compiling.compiler()
    except compiling.CompileError as error:
        pytest.skip(str(error))
    lines = [HEAD]
    for number, (kernel, geometry) in enumerate(CASES.values()):
        lines.append(f"namespace case_{number} {{ {kernel} }}")
        lines.append(f'extern "C" int run_{number}(float* x) {{')
        lines.append(f"  return launch(Launch{{}}, case_{number}::k, {geometry}, x);\n}}")
    source = tmp_path_factory.mktemp("emulation") / "cases.cu"
    source.write_text("\n".join(lines))
    words = [compiler, *compiling.EMULATION_FLAGS, "-fvisibility=default", f"-I{compiling.SOURCES / 'cuda'}", "-shared"]
    subprocess.run([*words, str(source), "-o", str(source.with_suffix(".so"))], check=True, capture_output=True)
    return source.with_suffix(".so")


def function_of(case: str | bool) -> str:
    return f"run_{[*CASES].index(case)}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_process(library, fault):
    words = [sys.executable, "-c", RUN, str(library), function_of(fault)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode < 0 and fault in done.stderr


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_shows(library, barrier):
    """Each thread takes what its neighbour has put down, around the block: in every order of the threads somebody comes
    too early.
    """
    x = (ctypes.c_float * 4096)()
    assert ctypes.CDLL(str(library))[function_of(barrier)](x) == 0
    right = [(i + 1) % 64 for i in range(64)]
    assert all((list(x[block * 64 : block * 64 + 64]) == right) == barrier for block in range(6))
