// residual + dropout(x + bias) in one pass; each of residual, bias and dropout may be absent.
//
// The mask is a function of a key per row and the column: the counter-based hash of fused_ops/counter_hash.py, bit for bit.
#include "columns.h"
#include "elements.h"

using namespace mz;

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u, FIRST = 0xBF58476D1CE4E5B9u, SECOND = 0x94D049BB133111EBu;

MZ_DEVICE uint64_t folded(uint64_t x, int by) { return x ^ (x >> by); }

// A word decides two columns: its lower half the even one. Kept is what does not lie below the threshold.
struct Mask {
  uint64_t key, second;  // of the row; the second one is folded, so that a word needs one operation less for it
  int32_t threshold;

  MZ_DEVICE Mask(int64_t of_row, int32_t threshold) : key((uint64_t)of_row), threshold(threshold) {
    second = folded(folded(folded(folded(key + GOLDEN, 30) * FIRST, 27) * SECOND, 31), 27);
  }
  MZ_DEVICE uint64_t word(uint64_t counter) const { return folded((folded(folded(counter, 30) * FIRST, 27) ^ second) * SECOND, 31); }
  template <int W> MZ_DEVICE Floats<W> apply(Floats<W> x, int64_t column, float factor) const {
    uint64_t first = (uint64_t)column / 2 * GOLDEN + key;
    if constexpr (W == 1) {
      uint64_t own = word(first);
      x[0] = (int32_t)(column % 2 ? own >> 32 : own) < threshold ? 0.0f : x[0] * factor;
    } else {
#pragma unroll
      for (int j = 0; j < W; j += 2) {
        uint64_t own = word(first + j / 2 * GOLDEN);
        x[j] = (int32_t)own < threshold ? 0.0f : x[j] * factor;
        x[j + 1] = (int32_t)(own >> 32) < threshold ? 0.0f : x[j + 1] * factor;
      }
    }
    return x;
  }
};

struct Dropout { const int64_t* keys; float factor; int32_t threshold; };

template <typename T, int W_> struct Forward {
  static constexpr int W = W_;
  T* y;
  const T *x, *bias, *residual;
  Dropout drop;
  int64_t columns;
  MZ_DEVICE void operator()(int64_t row, int64_t column) const {
    int64_t at = row * columns + column;
    Floats<W> value = load<W>(x + at);
    if (bias) value = value + load<W>(bias + column);
    if (drop.keys) value = Mask(drop.keys[row], drop.threshold).apply(value, column, drop.factor);
    if (residual) value = value + load<W>(residual + at);
    store<W>(y + at, value);
  }
};

// dx = dropout(grad), where there is one, and its part of the bias gradient.
template <typename T, int W_> struct Backward {
  static constexpr int W = W_, ARRAYS = 1, AHEAD = 2;
  struct Inputs { Words<T, W> grad; int64_t key; };
  T* dx;
  const T* grad;
  Dropout drop;
  int64_t columns;
  MZ_DEVICE Inputs read(int64_t row, int64_t column) const {
    return {fetch<W>(grad + row * columns + column), drop.keys ? drop.keys[row] : 0};
  }
  MZ_DEVICE Sums<1, W> operator()(const Inputs& of, int64_t row, int64_t column) const {
    Floats<W> value = widened(of.grad);
    if (drop.keys) {
      value = Mask(of.key, drop.threshold).apply(value, column, drop.factor);
      store<W>(dx + row * columns + column, value);
    }
    return {{value}};
  }
};

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                          \
  MZ_API int bias_dropout_residual_##SUFFIX(Launch* to, int64_t rows, int64_t columns, T* y, const T* x, const T* bias,               \
                                            const T* residual, const int64_t* keys, float factor, int64_t threshold) {                \
    constexpr int W = WIDEST<T>;                                                                                                      \
    Dropout drop{keys, factor, (int32_t)threshold};                                                                                   \
    if (columns % W == 0 && aligned<W>(y, x, bias, residual))                                                                         \
      return each_element(*to, Forward<T, W>{y, x, bias, residual, drop, columns}, rows, columns);                                    \
    return each_element(*to, Forward<T, 1>{y, x, bias, residual, drop, columns}, rows, columns);                                      \
  }                                                                                                                                   \
  MZ_API int bias_dropout_backward_##SUFFIX(Launch* to, int64_t rows, int64_t columns, T* dx, float* dbias, const T* grad,            \
                                            const int64_t* keys, float factor, int64_t threshold) {                                   \
    constexpr int W = WIDEST<T>;                                                                                                      \
    Dropout drop{keys, factor, (int32_t)threshold};                                                                                   \
    if (columns % W == 0 && aligned<W>(dx, grad))                                                                                     \
      return sum_over_rows(*to, Backward<T, W>{dx, grad, drop, columns}, rows, columns, dbias);                                       \
    return sum_over_rows(*to, Backward<T, 1>{dx, grad, drop, columns}, rows, columns, dbias);                                         \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
