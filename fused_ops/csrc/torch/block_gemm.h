// Small matrix products on the processor's matrix units: C [m, n] (+)= A [m, k] B [k, n], sums in float.
//
// The type of the operands determines the layout of the right one, B. bf16 and fp16: pairs of rows, [k/2, n, 2], as AMX
// and the dot products of AVX-512 read them. plain<bf16>, plain<fp16> and float: rows, [k, n], for units that multiply
// in float. The left operand, A, is always in rows. block_trial.h finds the types that this processor can multiply.
#pragma once

#include <cstdint>

#ifdef MZ_BORROWED  // tests put the product of another processor here
#include MZ_BORROWED
#else
#include "borrowed.h"
#endif

namespace mz {

template <typename T> struct plain : T {};
template <typename T> constexpr int DIGITS<plain<T>> = DIGITS<T>;

template <typename M> constexpr bool in_pairs = std::is_same<M, bf16>::value || std::is_same<M, fp16>::value;
// Column c of a right operand begins at c * pair<M>, and its (even) row k at k * ldb.
template <typename M> constexpr int64_t pair = in_pairs<M> ? 2 : 1;

template <typename M> struct Stored { using type = M; };
template <typename T> struct Stored<plain<T>> { using type = T; };

// One product; ld*: elements between rows of A and C, and between rows of B or pairs of rows / 2. k is even.
template <typename M>
MZ_INLINE void block_gemm(int64_t m, int64_t n, int64_t k, const M* a, int64_t lda, const M* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  borrowed::product<typename Stored<M>::type>(m, n, k, a, lda, b, ldb, c, ldc, add);
}

// Releases the state of the matrix units (AMX tiles). Called once after a thread's products.
template <typename M> MZ_INLINE void block_gemm_done() { borrowed::done<typename Stored<M>::type>(); }

// Rows [k, n] of 16 bits each -> pairs of rows [k/2, n, 2]. k is even.
MZ_INLINE void pack_pairs(int64_t k, int64_t n, const uint16_t* from, uint32_t* to) {
  for (int64_t i = 0; i < k; i += 2, from += 2 * n, to += n) {
    const uint16_t* second = from + n;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) to[j] = (uint32_t)from[j] | (uint32_t)second[j] << 16;
  }
}

// Tile [k, n] -> right operand [k, n].
template <typename M> MZ_INLINE void to_right(int64_t k, int64_t n, const M* tile, M* to) {
  if constexpr (in_pairs<M>)
    pack_pairs(k, n, reinterpret_cast<const uint16_t*>(tile), reinterpret_cast<uint32_t*>(to));
  else
    memcpy(static_cast<void*>(to), tile, k * n * sizeof(M));
}

}  // namespace mz
