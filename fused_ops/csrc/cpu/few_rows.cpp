// A linear layer of few rows, as in text generation: y = x W^T + b, x [m, k], W [n, k].
//
// Reading the weight takes most of the time, so it is read once. Up to eight rows of x are multiplied with each vector
// of it. A block of outputs has enough independent sums to hide the latency of the multiplier. One thread computes the
// sum of an output, in a fixed order.
#include "rows.h"

using namespace mz;

namespace {

constexpr int64_t STEP = 2 * LANES;

template <int M> constexpr int OUTPUTS = M == 8 ? 2 : M == 4 ? 4 : 8;  // at a time

// How STEP numbers of x and of the weight are held and multiplied: as two vectors of floats, in the order in which T is
// loaded.
template <typename T> struct Floats {
  typedef float Row;
  typedef Two Part;
  static MZ_MEMBER void widen(float* row, const T* part) { Two x = load_two(part); store(row, x.first), store(row + LANES, x.second); }
  static MZ_MEMBER Two weight(const T* w) { return load_two(w); }
  static MZ_MEMBER Two row(const float* x) { return {load(x), load(x + LANES)}; }
  static MZ_MEMBER F add(F total, Two x, Two w) { return total + x.first * w.first + x.second * w.second; }
};

template <typename T> struct Held : Floats<T> {};
#ifdef __AVX512BF16__
// As bf16: one instruction multiplies 32 pairs and adds two products to each of 16 sums.
template <> struct Held<bf16> {
  typedef bf16 Row;
  typedef __m512bh Part;
  static MZ_MEMBER void widen(bf16* row, const bf16* part) { memcpy((void*)row, part, STEP * sizeof(bf16)); }
  static MZ_MEMBER __m512bh weight(const bf16* w) { return (__m512bh)_mm512_loadu_si512(w); }
  static MZ_MEMBER __m512bh row(const bf16* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static MZ_MEMBER F add(F total, __m512bh x, __m512bh w) { return (F)_mm512_dpbf16_ps((__m512)total, x, w); }
};
#endif
template <typename T> using Row = typename Held<T>::Row;

// Rows of x in whole STEPs.
template <typename T> std::vector<Row<T>> held(int64_t m, int64_t k, int64_t wide, const T* x) {
  std::vector<Row<T>> rows(m * wide);
  for (int64_t row = 0; row < m; ++row)
    for (int64_t i = 0; i < k; i += STEP) {
      T part[STEP] = {};
      memcpy((void*)part, x + row * k + i, std::min(STEP, k - i) * sizeof(T));
      Held<T>::widen(&rows[row * wide + i], part);
    }
  return rows;
}

// N outputs of M rows: x [M, wide], w [N, k], rows of y n apart.
template <typename T, int M, int N>
void block(int64_t k, int64_t wide, int64_t n, const Row<T>* x, const T* w, const T* bias, T* y) {
  static_assert(N * M <= LANES, "their sums are one vector");
  F sums[LANES] = {};  // of row r and output j at r * N + j
  auto step = [&](int64_t i, const T* weights, int64_t stride) MZ_LAMBDA {
    typename Held<T>::Part part[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) part[j] = Held<T>::weight(weights + j * stride);
#pragma GCC unroll 8
    for (int row = 0; row < M; ++row) {
      auto of_x = Held<T>::row(x + row * wide + i);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[row * N + j] = Held<T>::add(sums[row * N + j], of_x, part[j]);
    }
  };
  int64_t whole = k / STEP * STEP;
  for (int64_t i = 0; i < whole; i += STEP) step(i, w + i, k);
  if (whole < k) {
    T rest[N * STEP] = {};
    for (int j = 0; j < N; ++j) memcpy((void*)(rest + j * STEP), w + j * k + whole, (k - whole) * sizeof(T));
    step(whole, rest, STEP);
  }
  float added[LANES] = {};
  if (bias)
    for (int j = 0; j < N; ++j) {
      float own = get(bias + j);
      for (int row = 0; row < M; ++row) added[row * N + j] = own;
    }
  T found[LANES];
  store(found, sums_of(sums) + load(added));
  for (int row = 0; row < M; ++row) memcpy((void*)(y + row * n), found + row * N, N * sizeof(T));
}

// Outputs [begin, end) of M rows.
template <typename T, int M>
void outputs(int64_t begin, int64_t end, int64_t k, int64_t wide, int64_t n, const Row<T>* x, const T* w, const T* bias, T* y) {
  constexpr int N = OUTPUTS<M>;
  int64_t j = begin;
  for (; j + N <= end; j += N) block<T, M, N>(k, wide, n, x, w + j * k, bias ? bias + j : nullptr, y + j);
  for (; j < end; ++j) block<T, M, 1>(k, wide, n, x, w + j * k, bias ? bias + j : nullptr, y + j);
}

template <typename T> void few_rows(int64_t threads, int64_t m, int64_t k, int64_t n, T* y, const T* x, const T* w, const T* bias) {
  int64_t wide = (k + STEP - 1) / STEP * STEP;
  std::vector<Row<T>> rows = held(m, k, wide, x);
  constexpr int64_t CACHED = 32;  // outputs whose weights stay in the cache for all rows
  parallel_for(n, std::max<int64_t>(CACHED, (1 << 17) / std::max<int64_t>(k, 1)), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t from = begin; from < end; from += m <= 8 ? end - begin : CACHED) {
      int64_t to = m <= 8 ? end : std::min(end, from + CACHED);
      int64_t row = 0;
#define MZ_TAKE(M) for (; row + M <= m; row += M) outputs<T, M>(from, to, k, wide, n, &rows[row * wide], w, bias, y + row * n);
      MZ_TAKE(8) MZ_TAKE(4) MZ_TAKE(2) MZ_TAKE(1)
    }
  });
}

}  // namespace

// y [m, n], x [m, k], w [n, k], bias [n] or null.
#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void few_rows_##SUFFIX(int64_t threads, int64_t m, int64_t k, int64_t n, T* y, const T* x, const T* w, const T* bias) { \
    few_rows(threads, m, k, n, y, x, w, bias);                                                                                \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
