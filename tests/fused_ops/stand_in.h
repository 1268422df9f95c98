// A block product in the place of csrc/torch/borrowed.h: that of a processor which the environment names, a habit per type, in plain loops.
//
// BLOCK_PRODUCT_FP32, BLOCK_PRODUCT_BF16, BLOCK_PRODUCT_FP16: rows or pairs, as the right operand is read; none, it throws; or a fault:
// zeros, it writes zeros; forgetful, it adds to nothing; rounded, its result has 16 bits; swapped, it reads the second of a pair first;
// beyond, it writes past the last column. Read when a type is first asked for.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../../fused_ops/csrc/cpu/kernel.h"

namespace mz {
namespace borrowed {

template <typename T> const std::string& habit() {
  static const std::string found = [] {
    const char* given = std::getenv(sizeof(T) == 4 ? "BLOCK_PRODUCT_FP32" : std::is_same<T, bf16>::value ? "BLOCK_PRODUCT_BF16" : "BLOCK_PRODUCT_FP16");
    return std::string(given ? given : sizeof(T) == 4 ? "rows" : "pairs");
  }();
  return found;
}

template <typename T> bool offered() { return true; }

template <typename T>
void product(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  const std::string& way = habit<T>();
  if (way == "none") throw std::runtime_error("no such product");
  bool pairs = sizeof(T) == 2 && way != "rows", swapped = way == "swapped";
  std::vector<float> right(k * n), row(n);
  for (int64_t p = 0; p < k; ++p)
    for (int64_t j = 0; j < n; ++j) right[p * n + j] = get(pairs ? b + p / 2 * 2 * ldb + 2 * j + (p % 2 != swapped) : b + p * ldb + j);
  for (int64_t i = 0; i < m; ++i) {
    std::fill(row.begin(), row.end(), 0.0f);
    for (int64_t p = 0; p < k; ++p) {
      float left = get(a + i * lda + p);
      for (int64_t j = 0; j < n; ++j) row[j] += left * right[p * n + j];
    }
    for (int64_t j = 0; j < n; ++j) {
      float before = add && way != "forgetful" ? c[i * ldc + j] : 0.0f, sum = way == "zeros" ? 0.0f : before + row[j];
      bf16 narrow;
      put(&narrow, sum);
      c[i * ldc + j] = way == "rounded" ? get(&narrow) : sum;
    }
    if (way == "beyond" && n < ldc) c[i * ldc + n] = 0.0f;
  }
}

template <typename T> void done() {}

}  // namespace borrowed
}  // namespace mz
