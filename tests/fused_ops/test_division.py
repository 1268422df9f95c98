"""Division by a multiplication, as kernels find their row by it, against the division of C++."""

import ctypes
import subprocess

import pytest

from fused_ops.native import compile as compiling

SOURCE = r"""
#include "division.h"
static int64_t wrong;
static void check(const mz::Divisor& divisor, int64_t n) { wrong += n >= 0 && divisor(n) != n / divisor.by; }
static void check_all(int64_t by) {
  mz::Divisor divisor(by);
  for (int64_t n = 0; n < 3000; ++n) check(divisor, n);
  for (int bit = 0; bit < 62; ++bit) {
    int64_t power = (int64_t)1 << bit, multiple = power / by * by;
    for (int64_t near = -2; near <= 2; ++near)
      check(divisor, power + near), check(divisor, multiple + near), check(divisor, by + near);
  }
  uint64_t random = 1;
  for (int k = 0; k < 2000; ++k) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    check(divisor, (int64_t)(random >> 33)), check(divisor, (int64_t)(random >> 33) / by * by - 1);
  }
}
extern "C" int64_t count_wrong(int64_t any) {
  for (int64_t by = 1; by < 1500; ++by) check_all(by);
  for (int bit = 10; bit < 40; ++bit)
    for (int64_t near = -3; near <= 3; ++near)
      check_all(((int64_t)1 << bit) + near), check_all(((int64_t)3 << bit) / 2 + near);
  check_all(any);
  return wrong;
}
"""


@pytest.mark.slow
def test_a_multiplication_divides_exactly(tmp_path):
    try:
        compiler = compiling.compiler()
    except compiling.CompileError as error:
        pytest.skip(str(error))
    source, made = tmp_path / "division.cpp", tmp_path / "division.so"
    source.write_text(SOURCE)
    words = [compiler, "-O1", "-std=c++17", "-fPIC", "-shared", f"-I{compiling.SOURCES / 'cuda'}", str(source)]
    subprocess.run([*words, "-o", str(made)], check=True, capture_output=True)
    count = ctypes.CDLL(str(made)).count_wrong
    count.restype = ctypes.c_int64
    assert count(ctypes.c_int64(50304)) == 0
