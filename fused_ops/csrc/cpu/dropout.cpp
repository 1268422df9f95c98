// residual + dropout(x + bias) in one pass; each of residual, bias and dropout may be absent.
//
// The mask is a function of a key per row and the column: the counter-based hash of fused_ops/counter_hash.py, bit for bit.
#include "rows.h"

using namespace mz;

namespace {

typedef uint64_t W __attribute__((vector_size(64)));  // eight words, of which each decides two columns

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u, FIRST = 0xBF58476D1CE4E5B9u, SECOND = 0x94D049BB133111EBu;

struct Mask { uint64_t key, second; };

MZ_INLINE Mask mask_of(int64_t key) {
  uint64_t x = (uint64_t)key + GOLDEN;
  x = (x ^ (x >> 30)) * FIRST;
  x = (x ^ (x >> 27)) * SECOND;
  return {(uint64_t)key, x ^ (x >> 31)};
}

// Columns column .. column + 15, column even: -1 where the half-word lies below the threshold.
MZ_INLINE I dropped(const Mask& mask, int64_t column, int32_t threshold) {
  W counter = W{0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(column / 2);
  W x = counter * GOLDEN + mask.key;
  x = ((x ^ (x >> 30)) * FIRST) ^ mask.second;
  x = (x ^ (x >> 27)) * SECOND;
  x ^= x >> 31;
  I halves; memcpy(&halves, &x, sizeof halves);
  return halves < threshold;
}

struct Dropout { const int64_t* keys; float factor; int32_t threshold; };

template <typename T>
MZ_INLINE void dropped_row(int64_t columns, T* y, const T* x, const T* bias, const T* residual, const Dropout& drop, int64_t row) {
  Mask mask = mask_of(drop.keys[row]);
  each_vector(columns, [&](int64_t i, int64_t n) MZ_LAMBDA {
    F value = load(x + i, n);
    if (bias) value += load(bias + i, n);
    value = choose(dropped(mask, i, drop.threshold), splat(0.0f), value * drop.factor);
    if (residual) value += load(residual + i, n);
    store(y + i, value, n);
  });
}

template <typename T> MZ_INLINE void whole_row(int64_t columns, T* y, const T* x, const T* bias, const T* residual) {
  if (bias && residual) map(columns, y, [](F x, F bias, F residual) MZ_LAMBDA { return x + bias + residual; }, x, bias, residual);
  else if (bias || residual) map(columns, y, plus, x, bias ? bias : residual);
  else map(columns, y, [](F x) MZ_LAMBDA { return x; }, x);
}

template <typename T>
void forward(int64_t threads, int64_t rows, int64_t columns, T* y, const T* x, const T* bias, const T* residual, const Dropout& drop) {
  parallel_for(rows, grain(columns), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t at = row * columns;
      const T* other = residual ? residual + at : nullptr;
      if (drop.keys) dropped_row(columns, y + at, x + at, bias, other, drop, row);
      else whole_row(columns, y + at, x + at, bias, other);
    }
  });
}

// dx = dropout(grad), where there is one, and the bias gradient, the sum of dx over the rows.
template <typename T>
void backward(int64_t threads, int64_t rows, int64_t columns, T* dx, float* dbias, const T* grad, const Dropout& drop) {
  if (!drop.keys)
    return sum_over_rows<T>(threads, rows, columns, 1, dbias, [&](int64_t begin, int64_t end, float* sums) {
      add_rows<T, 8>(begin, end, columns, sums, [&](int64_t row, int64_t i, auto at) MZ_LAMBDA { return at.load(grad + row * columns + i); });
    });
  sum_over_rows<float>(threads, rows, columns, 1, dbias, [&](int64_t begin, int64_t end, float* sums) {
    for (int64_t row = begin; row < end; ++row) {
      Mask mask = mask_of(drop.keys[row]);
      each_vector(columns, [&](int64_t i, int64_t n) MZ_LAMBDA {
        F value = load(grad + row * columns + i, n);
        value = choose(dropped(mask, i, drop.threshold), splat(0.0f), value * drop.factor);
        store(dx + row * columns + i, value, n);
        store(sums + i, load(sums + i, n) + value, n);
      });
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void bias_dropout_residual_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* y, const T* x, const T* bias, \
                                             const T* residual, const int64_t* keys, float factor, int64_t threshold) {       \
    forward(threads, rows, columns, y, x, bias, residual, {keys, factor, (int32_t)threshold});                                \
  }                                                                                                                           \
  MZ_API void bias_dropout_backward_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* dx, float* dbias,             \
                                             const T* grad, const int64_t* keys, float factor, int64_t threshold) {           \
    backward(threads, rows, columns, dx, dbias, grad, {keys, factor, (int32_t)threshold});                                    \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
