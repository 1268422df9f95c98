// A trial that finds the layout of the right operand for this processor's block products, by multiplying known numbers.
//
// The library cannot check the layout of an operand. On a processor with AVX512-FP16 and without AMX-FP16 its fp16
// product reads plain rows; on every other processor it reads pairs of rows. Its headers do not tell which, and the
// wrong layout gives wrong numbers without an error. So every product is computed once in every layout and compared
// with sums in double.
#pragma once

#include <exception>
#include <vector>

#include "block_gemm.h"

namespace mz {

enum Layout : int64_t { NONE = 0, PAIRS = 1, ROWS = 2 };

struct TrialShape { int64_t m, n, k, ldb, ldc; };  // of the kinds that attention and the weight gradient have
constexpr TrialShape TRIALS[] = {{64, 96, 32, 128, 96}, {96, 64, 160, 64, 96}, {128, 128, 512, 128, 128}, {16, 48, 80, 64, 48}};

// In [-2, 2), no two neighbours alike, with all the digits that M has.
template <typename M> std::vector<M> known_numbers(int64_t n, uint32_t seed) {
  std::vector<M> numbers(n);
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = (uint32_t)i * 2654435761u + seed * 2246822519u;
    bits = (bits ^ bits >> 15) * 2246822519u, bits = (bits ^ bits >> 13) * 3266489917u, bits ^= bits >> 16;
    put(&numbers[i], (float)((double)bits / (1u << 30) - 2.0));
  }
  return numbers;
}

template <typename M> std::vector<double> widened(const std::vector<M>& numbers) {
  std::vector<double> wide(numbers.size());
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = get(&numbers[i]);
  return wide;
}

// Whether one product agrees with sums in double up to float's rounding, and writes nothing outside its result.
template <typename M> bool multiplies_rightly(const TrialShape& s, bool add) {
  std::vector<M> a = known_numbers<M>(s.m * s.k, 1), b = known_numbers<M>(s.k * s.ldb, 2), right(b.size());
  std::vector<float> before = known_numbers<float>(s.m * s.ldc, 3), found = before;
  std::vector<double> left = widened(a), down = widened(b), sum(s.ldc), size(s.ldc);
  to_right(s.k, s.ldb, b.data(), right.data());
  block_gemm<M>(s.m, s.n, s.k, a.data(), s.k, right.data(), s.ldb, found.data(), s.ldc, add);
  block_gemm_done<M>();
  for (int64_t i = 0; i < s.m; ++i) {
    const float *was = &before[i * s.ldc], *is = &found[i * s.ldc];
    for (int64_t j = 0; j < s.ldc; ++j) sum[j] = add || j >= s.n ? was[j] : 0.0, size[j] = std::abs(sum[j]);
    for (int64_t p = 0; p < s.k; ++p) {
      const double* row = &down[p * s.ldb];
      double factor = left[i * s.k + p];
      for (int64_t j = 0; j < s.n; ++j) sum[j] += factor * row[j], size[j] += std::abs(factor * row[j]);
    }
    for (int64_t j = 0; j < s.ldc; ++j)
      if (!(std::abs(is[j] - sum[j]) <= (j < s.n ? 2e-6 * size[j] : 0.0))) return false;  // NaN is no number that fits
  }
  return true;
}

template <typename M> bool passes() {
  try {
    for (const TrialShape& shape : TRIALS)
      for (bool add : {false, true})
        if (!multiplies_rightly<M>(shape, add)) return false;
  } catch (const std::exception&) {  // the library has no such product
    return false;
  }
  return true;
}

// The layout in which block products of T are correct on this processor. It is tried once in a process, at the first
// call.
template <typename T> Layout layout() {
  if (!borrowed::offered<T>()) return NONE;
  static const Layout found = [] {
    if constexpr (sizeof(T) == 2) return passes<T>() ? PAIRS : passes<plain<T>>() ? ROWS : NONE;
    return passes<float>() ? ROWS : NONE;
  }();
  return found;
}

// Calls body(M{}) for the type M in which tensors of T are multiplied: T, plain<T>, or float if neither is correct.
template <typename T, typename Body> void with_operands(const Body& body) {
  if constexpr (sizeof(T) == 2) {
    Layout found = layout<T>();
    if (found == PAIRS) return body(T{});
    if (found == ROWS) return body(plain<T>{});
  }
  body(float{});
}

}  // namespace mz
