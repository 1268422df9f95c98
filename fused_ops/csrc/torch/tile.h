// Operands of block products C [m, n] += A [m, k] B [k, n] for an op with strided tensors of type T. They are
// contiguous tiles, padded with zeros, of the type M that is multiplied (T or plain<T> if the processor can, else
// float). block_gemm.h describes the layouts of left and right operands of M. All sizes here are multiples of EDGE.
#pragma once

#include "../cpu/buffer.h"
#include "../cpu/transpose.h"
#include "block_trial.h"

namespace mz {

constexpr int64_t EDGE = 32;
template <typename M> constexpr int64_t a_word = 4 / sizeof(M);  // elements

MZ_INLINE int64_t round_down(int64_t n, int64_t unit) { return n / unit * unit; }
MZ_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Calls body(from, to) for the parts of [from, to) that the borders at multiples of `unit` leave.
template <typename Body> MZ_INLINE void each_piece(int64_t from, int64_t to, int64_t unit, const Body& body) {
  for (int64_t next; from < to; from = next) next = std::min(to, round_down(from, unit) + unit), body(from, next);
}

// --- products -------------------------------------------------------------------------------------------------------

// A product of floats in plain vectors, where the library offers none: HEIGHT rows of C are held while k passes by.
template <int HEIGHT>
MZ_INLINE void plain_rows(int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  for (int64_t j = 0; j < n; j += LANES) {
    F sums[HEIGHT];
    for (int i = 0; i < HEIGHT; ++i) sums[i] = add ? load(c + i * ldc + j) : F{};
    for (int64_t p = 0; p < k; ++p) {
      F row = load(b + p * ldb + j);
      for (int i = 0; i < HEIGHT; ++i) sums[i] += row * a[i * lda + p];
    }
    for (int i = 0; i < HEIGHT; ++i) store(c + i * ldc + j, sums[i]);
  }
}

template <typename M>
MZ_INLINE void product(int64_t m, int64_t n, int64_t k, const M* a, int64_t lda, const M* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  if constexpr (sizeof(M) == 4)
    if (layout<float>() == NONE) {
      for (int64_t i = 0; i < m; i += 4) plain_rows<4>(n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
      return;
    }
  block_gemm<M>(m, n, k, a, lda, b, ldb, c, ldc, add);
}

// --- packing --------------------------------------------------------------------------------------------------------

constexpr int64_t LINE = 64;   // bytes of a line of the caches
constexpr int64_t AHEAD = 16;  // rows that are fetched before their turn, since the processor does not foresee rows that are far apart
enum Access { READ = 0, WRITE = 1 };

template <Access ACCESS = READ, typename T> MZ_INLINE void prefetch(const T* row, int64_t n) {
  for (int64_t j = 0; j < n; j += LINE / (int64_t)sizeof(T)) __builtin_prefetch(row + j, ACCESS);
}

// In lines, as a call of memcpy takes longer than the copy of a head's row.
template <typename T, typename M> MZ_INLINE void copy(M* to, const T* from, int64_t n) {
  constexpr int64_t step = LINE / sizeof(T);
  int64_t j = 0;
  for (; j + step <= n; j += step) memcpy(static_cast<void*>(to + j), from + j, LINE);
  if (j < n) memcpy(static_cast<void*>(to + j), from + j, (n - j) * sizeof(T));
}

// Strided rows [rows, columns] of a tensor -> tile [all, wide], zeros around.
template <typename T, typename M>
MZ_INLINE void gather(int64_t rows, int64_t columns, const T* from, int64_t ld, M* to, int64_t all, int64_t wide) {
  for (int64_t i = 0; i < rows; ++i, to += wide) {
    const T* row = from + i * ld;
    prefetch(row + AHEAD * ld, columns);
    if constexpr (sizeof(T) == sizeof(M))
      copy(to, row, columns);
    else
      for (int64_t j = 0; j < columns; j += LANES) store(to + j, load(row + j, columns - j), columns - j);
    if (columns < wide) memset(static_cast<void*>(to + columns), 0, (wide - columns) * sizeof(M));
  }
  memset(static_cast<void*>(to), 0, (all - rows) * wide * sizeof(M));
}

// Calls put(row, column, words) for the transpose of 4-byte words [rows, columns]: a register of words of one column.
template <typename Put> MZ_INLINE void each_column(int64_t rows, int64_t columns, const void* from, int64_t ld, const Put& put) {
  const uint32_t* words = static_cast<const uint32_t*>(from);
  for (int64_t i = 0; i < rows; i += NATIVE)
    for (int64_t j = 0; j < columns; j += NATIVE) {
      NativeU v[NATIVE];
#pragma GCC unroll 16
      for (int k = 0; k < NATIVE; ++k) memcpy(&v[k], words + (i + k) * ld + j, sizeof v[k]);
      transpose(v);
#pragma GCC unroll 16
      for (int k = 0; k < NATIVE; ++k) put(i, j + k, v[k]);
    }
}

// Tile [k, m] -> left operand [m, k]. A word of two 16-bit values gives a lane to each of two rows.
template <typename M> MZ_INLINE void to_left_transposed(int64_t m, int64_t k, const M* tile, M* to) {
  each_column(k, m / a_word<M>, tile, m / a_word<M>, [&](int64_t i, int64_t j, NativeU v) {
    if constexpr (sizeof(M) == 2) {
      NativeH low = __builtin_convertvector(v & 0xffffu, NativeH), high = __builtin_convertvector(v >> 16, NativeH);
      memcpy(to + 2 * j * k + i, &low, sizeof low), memcpy(to + (2 * j + 1) * k + i, &high, sizeof high);
    } else {
      memcpy(to + j * k + i, &v, sizeof v);
    }
  });
}

// Tile [n, k] -> right operand [k, n]. In pairs of rows neighbours in a row of the tile are a pair, and a pair is a
// word.
template <typename M> MZ_INLINE void to_right_transposed(int64_t k, int64_t n, const M* tile, M* to) {
  if constexpr (!in_pairs<M>) return to_left_transposed(k, n, tile, to);
  uint32_t* words = reinterpret_cast<uint32_t*>(to);
  each_column(n, k / 2, tile, k / 2, [&](int64_t i, int64_t j, NativeU v) { memcpy(words + j * n + i, &v, sizeof v); });
}

}  // namespace mz
