"""Reading the machine code of CUDA kernels: a fault that is planted in a kernel is found, and none in a good one. The
table of what they cost.
"""

from __future__ import annotations

import json
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest

from bench.kernel_budgets import BUDGETS, CARDS, H100, Budget, Found, Limits
from bench.kernel_table import kernel_table
from bench.machine_code import Kernel, disassembler, kernels_of
from fused_ops.native import compile as compiling

TEMPLATE = """
#include "numbers.h"
using namespace mz;

// Adds 1, four packs at a time.
__global__ void __launch_bounds__(256) good(float* x, int n) {
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < n; i += 4096) {
    Floats<4> pack[4];
    for (int p = 0; p < 4; ++p) pack[p] = load<4>(x + i + p * 1024);
    for (int p = 0; p < 4; ++p) store<4>(x + i + p * 1024, pack[p] + all_of<4>(1.0f));
  }
}
__global__ void __launch_bounds__(256) one_by_one(float* x, int n) {
  for (int i = threadIdx.x; i < n; i += 256) x[i] += 1.0f;
}
// Each pack is waited for before the next is asked for.
__global__ void __launch_bounds__(256) in_turn(float* x, int n) {
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < n; i += 1024) store<4>(x + i, load<4>(x + i) + all_of<4>(1.0f));
}
__global__ void __launch_bounds__(256) converts(float* x, int64_t n) {
#pragma unroll 1
  for (int64_t i = threadIdx.x * 4; i < n; i += 1024) store<4>(x + i, load<4>(x + i) + all_of<4>((float)(i * n)));
}
__global__ void __launch_bounds__(256) divides(float* x, int64_t n, int64_t by) {
#pragma unroll 1
  for (int64_t i = threadIdx.x * 4; i < n; i += 1024) store<4>(x + i * n / by, load<4>(x + i) + all_of<4>(1.0f));
}
__global__ void __launch_bounds__(256) computes(float* x, int n) {
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < n; i += 1024) {
    Floats<4> pack = load<4>(x + i);
#pragma unroll
    for (int k = 0; k < 99; ++k) pack = map([](float a) { return a * a + 0.5f; }, pack);
    store<4>(x + i, pack);
  }
}
// Each pack waits for its neighbours.
__global__ void __launch_bounds__(256) exchanges(float* x, int n) {
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < n; i += 1024) {
    Floats<4> pack = load<4>(x + i);
#pragma unroll 1
    for (int k = 0; k < 1; ++k) {
#pragma unroll
      for (int j = 0; j < 99; ++j) pack[0] += __shfl_xor_sync(WHOLE_WARP, pack[0], 1 << j % 5);
    }
    store<4>(x + i, pack);
  }
}
// More numbers than registers.
__global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {
  Floats<4> pack[20];
  for (int p = 0; p < 20; ++p) pack[p] = load<4>(x + (p * 1024 + threadIdx.x) * 4);
  __syncthreads();
  for (int p = 0; p < 20; ++p) store<4>(x + (threadIdx.x * 20 + p) * 4, pack[p] + pack[19 - p]);
}
"""
FAULTS = {
    "good": None,
    "one_by_one": "moves 4 bytes at once, not 16",
    "in_turn": "16 bytes of loads under way when the first is used, 64 at least",
    "converts": "converts 64-bit integers to floats (I2F.S64)",
    "divides": "divides 64-bit integers",
    "computes": "of the issue slots at 85% of the copy, 60% at most",
    "exchanges": "is estimated at",
    "spills": "keeps registers in local memory (LDL",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    tool = disassembler() or pytest.skip("no nvdisasm, which reads machine code; `pip install nvidia-cuda-nvdisasm`")
    try:
        nvcc = compiling.compiler(compiling.NVCC)
    except compiling.CompileError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("planted")
    source, cubin = folder / "planted.cu", folder / "planted.cubin"
    source.write_text(TEMPLATE)
    words = [nvcc, "-std=c++17", "-O3", "-arch=sm_90", "-cubin", f"-I{compiling.SOURCES / 'cuda'}"]
    subprocess.run([*words, str(source), "-o", str(cubin)], check=True, capture_output=True)
    return {kernel.name: kernel for kernel in kernels_of(cubin, tool)}


def found(kernel: Kernel, **limits: float) -> Found:
    most = Limits(**{"registers": 64, "slots": 99.0, "in_flight": 64, "estimate": 0.0} | limits)  # type: ignore[arg-type]
    return Found(kernel, Budget("", "", "", "", kernel.name, Fraction(1), {"90": most}, 256), H100)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(planted: dict[str, Kernel], name: str) -> None:
    faults, expected = list(found(planted[name]).faults()), FAULTS[name]
    if expected is None:
        assert not faults
    else:
        assert any(expected in fault for fault in faults), faults


@pytest.mark.slow
def test_what_a_good_kernel_shows(planted: dict[str, Kernel]) -> None:
    """Its main loop moves eight packs; the elements of each need an addition, and little else is in it."""
    one = found(planted["good"], registers=8, slots=0.1, in_flight=80)
    assert one.bytes == 8 * 16 and one.kernel.main.in_flight == 64 and one.estimate == 1.0
    assert 16 + 8 < len(one.main) < 48
    assert sum(i.name == "FADD" for i in one.main) == 16
    least = one.kernel.registers
    assert 16 < least <= 40
    assert list(one.faults()) == [
        f"{least} registers, 8 at most",
        f"{len(one.main) / 128:.2f} instructions per byte, 0.1 at most",
        "64 bytes of loads under way when the first is used, 80 at least",
    ]


TEXT = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/               @P0 EXIT ;
.L_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0040*/               @P1 BRA `(.L_2) ;
        /*0050*/                   CALL.REL.NOINC `($__cuda_sm20_div_s64) ;
.L_2:
        /*0060*/                   FADD R4, R4, R9 ;
        /*0070*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0080*/              @!P2 BRA `(.L_1) ;
        /*0090*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*00a0*/                   EXIT ;
.L_3:
        /*00b0*/                   BRA `(.L_3) ;
"""


def test_the_main_loop_leaves_out_what_is_called_and_what_surrounds_it() -> None:
    kernel = Kernel("k", 12, TEXT.splitlines())
    names = [i.name for i in kernel.main.instructions]
    assert names == ["LDG", "LDG", "BRA", "FADD", "STG", "BRA"]
    assert kernel.main.wide_bytes == 48 and kernel.main.in_flight == 32
    assert [i.name for i in kernel.way.instructions] == ["S2R", "EXIT", *names, "LDG", "EXIT"]
    assert sum(i.calls for i in kernel.within_main) == 1


def test_the_limit_of_slots_is_that_of_the_cards() -> None:
    """132 multiprocessors issue four instructions of 32 threads a cycle: at 1.7 GHz 9.4 for each byte of a copy."""
    assert H100.slot_share(9.45) == pytest.approx(0.85, rel=1e-3)
    assert {name: round(card.slot_share(1.0), 3) for name, card in CARDS.items()} == {"90": 0.09, "80": 0.075}


def test_the_table_has_every_kernel_before_and_now_and_the_last_measurement(tmp_path: Path) -> None:
    """Of two files of results the first is before and the last is now; one of another card does not count."""
    for day, card, seconds in (("21", H100.name, 4.0), ("22", H100.name, 2.0), ("23", "T4", 1.0)):
        item = {"item": ["rotary", "bfloat16", "ours"], "shape": "", "bytes": {"forward": 6}}
        ops = [item | {"seconds": {"forward": [seconds]}}]
        results = {"card": {"card": f"NVIDIA {card}"}, "facts": {"copy_bytes_per_second": 3.0}, "ops": ops}
        (tmp_path / f"2026-11-{day}-gpu.json").write_text(json.dumps(results))
    headings, *rows = kernel_table(tmp_path)
    assert len(rows) == sum("90" in budget.limits for budget in BUDGETS)
    assert {len(row) for row in rows} == {len(headings)}
    measured = {row[:2]: row[-1] for row in rows if row[-1]}
    assert measured == {("rotary, bf16", "both"): "50%, 100%"}
    old = [row for row in rows if "blocks" not in row[0]]  # those of int8 and int4 are younger than that measurement
    assert len(old) > 25 and all(", " in cell for row in old for cell in row[2:7])
    assert all(cell.replace(".", "").rstrip("%").isdigit() for row in rows if row not in old for cell in row[2:6])
