// Small matrix products on the processor's matrix units, as torch's library offers them: C [m, n] (+)= A [m, k] B [k, n],
// products in float. B of a 16-bit type comes in pairs of rows, [k/2, n, 2] ("packed"), which is how the units read it.
#pragma once

#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "../cpu/kernel.h"

namespace mz {

template <typename T> struct Torch;
template <> struct Torch<float> { using type = float; };
template <> struct Torch<bf16> { using type = at::BFloat16; };
template <> struct Torch<fp16> { using type = at::Half; };

// One product; ld*: elements between rows of A and C, and between rows (float) or pairs of rows (16-bit) / 1 of B.
// 16-bit: k is even, and B's rows 2i and 2i+1 are interleaved, ldb counted in columns.
template <typename T>
MZ_INLINE void block_gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  using V = typename Torch<T>::type;
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, reinterpret_cast<const V*>(a), reinterpret_cast<const V*>(b), c,
                              /*is_vnni=*/sizeof(T) == 2);
}

// Frees what the matrix units hold (AMX tiles); once after a thread's products.
template <typename T> MZ_INLINE void block_gemm_done() { at::native::cpublas::brgemm_release(sizeof(T) == 2); }

// Rows [k, n] -> pairs of rows [k/2, n, 2]; an odd last row is paired with zeros.
template <typename T> MZ_INLINE void pack_pairs(int64_t k, int64_t n, const T* from, int64_t ld, T* to) {
  static_assert(sizeof(T) == 2);
  for (int64_t i = 0; i < k; i += 2) {
    const uint16_t* first = reinterpret_cast<const uint16_t*>(from + i * ld);
    const uint16_t* second = reinterpret_cast<const uint16_t*>(from + (i + 1) * ld);
    uint32_t* row = reinterpret_cast<uint32_t*>(to + i * n);
    if (i + 1 < k) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) row[j] = (uint32_t)first[j] | (uint32_t)second[j] << 16;
    } else {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) row[j] = first[j];
    }
  }
}

// The transpose of rows [n, k] -> pairs [k/2, n, 2]: neighbours in a row become a pair. k is even.
template <typename T> MZ_INLINE void pack_pairs_of_transpose(int64_t k, int64_t n, const T* from, int64_t ld, T* to) {
  static_assert(sizeof(T) == 2);
  uint32_t* pairs = reinterpret_cast<uint32_t*>(to);
  constexpr int64_t SQUARE = 16;
  for (int64_t j0 = 0; j0 < n; j0 += SQUARE)
    for (int64_t i0 = 0; i0 < k / 2; i0 += SQUARE)
      for (int64_t j = j0; j < std::min(j0 + SQUARE, n); ++j) {
        const T* row = from + j * ld;
        for (int64_t i = i0; i < std::min(i0 + SQUARE, k / 2); ++i) {
          uint32_t pair;
          memcpy(&pair, row + 2 * i, 4);
          pairs[i * n + j] = pair;
        }
      }
}

}  // namespace mz
