// LayerNorm and RMSNorm, alone or of a sum of two tensors, and their backward. A row stays in the first-level cache
// over its passes. The variance is computed from the distances to the mean, so that a large mean does not cost
// precision.
//
// Statistics per row: mean (LayerNorm only) and scale = 1 / sqrt(variance + eps).
#include "rows.h"

using namespace mz;

namespace {

template <bool CENTRED, typename T>
MZ_INLINE void normalise_row(int64_t h, T* y, const T* x, const T* weight, const T* bias, float eps, float* mean, float* scale) {
  float centre = 0.0f;
  if (CENTRED) {
    F total = splat(0.0f);
    each_part<T>(h, [&](int64_t i, auto at) MZ_LAMBDA { total = fold(plus, total, at.load(x + i)); });
    *mean = centre = sum(total) / h;
  }
  F squares = splat(0.0f);
  each_part<T>(h, [&](int64_t i, auto at) MZ_LAMBDA {
    auto distance = at.or_else(at.load(x + i) - centre, 0.0f);
    squares = fold(plus, squares, distance * distance);
  });
  float factor = *scale = 1.0f / __builtin_sqrtf(sum(squares) / h + eps);
  if (CENTRED) map(h, y, [&](F x, F weight, F bias) MZ_LAMBDA { return (x - centre) * factor * weight + bias; }, x, weight, bias);
  else map(h, y, [&](F x, F weight) MZ_LAMBDA { return x * factor * weight; }, x, weight);
}

// residual: total = x + residual is computed first; its rounded values are normalised.
template <bool CENTRED, typename T>
void forward(int64_t threads, int64_t rows, int64_t h, T* y, T* total, const T* x, const T* residual, const T* weight, const T* bias,
             float* mean, float* scale, float eps) {
  parallel_for(rows, grain(h), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in = x + row * h;
      if (residual) {
        const T* other = residual + row * h;
        T* out = total + row * h;
        map(h, out, plus, in, other);
        in = out;
      }
      normalise_row<CENTRED>(h, y + row * h, in, weight, bias, eps, CENTRED ? mean + row : nullptr, scale + row);
    }
  });
}

// With u = (x - mean) scale and d = grad weight: dx = scale (d - mean(d) - u mean(d u)) (+ passed, the gradient of the
// sum itself); weight gradient sum of grad u, bias gradient sum of grad. `sums` holds both, the weight's first.
template <bool CENTRED, typename T>
void backward(int64_t threads, int64_t rows, int64_t h, T* dx, float* sums, const T* grad, const T* passed, const T* x, const T* weight,
              const float* mean, const float* scale) {
  sum_over_rows<T>(threads, rows, h, CENTRED ? 2 : 1, sums, [&](int64_t begin, int64_t end, float* own) {
    for (int64_t row = begin; row < end; ++row) {
      const T *in = x + row * h, *g = grad + row * h, *other = passed ? passed + row * h : nullptr;
      T* out = dx + row * h;
      float centre = CENTRED ? mean[row] : 0.0f, factor = scale[row];
      F first = splat(0.0f), second = splat(0.0f);
      each_part<T>(h, [&](int64_t i, auto at) MZ_LAMBDA {
        auto unit = (at.load(in + i) - centre) * factor, incoming = at.load(g + i), weighted = incoming * at.load(weight + i);
        if (CENTRED) first = fold(plus, first, weighted);
        second = fold(plus, second, at.or_else(weighted * unit, 0.0f));
        at.put_sums(own + i, at.sums(own + i) + incoming * unit);
        if (CENTRED) at.put_sums(own + h + i, at.sums(own + h + i) + incoming);
      });
      float mean_d = CENTRED ? sum(first) / h : 0.0f, mean_du = sum(second) / h;
      auto back = [&](F x, F grad, F weight) MZ_LAMBDA { return (grad * weight - mean_d - (x - centre) * factor * mean_du) * factor; };
      if (other) map(h, out, [&](F x, F grad, F weight, F passed) MZ_LAMBDA { return back(x, grad, weight) + passed; }, in, g, weight, other);
      else map(h, out, back, in, g, weight);
    }
  });
}

}  // namespace

#define MZ_NORM(NAME, CENTRED, SUFFIX, T)                                                                                     \
  MZ_API void NAME##_##SUFFIX(int64_t threads, int64_t rows, int64_t h, T* y, T* total, const T* x, const T* residual,        \
                              const T* weight, const T* bias, float* mean, float* scale, float eps) {                         \
    forward<CENTRED>(threads, rows, h, y, total, x, residual, weight, bias, mean, scale, eps);                                \
  }                                                                                                                           \
  MZ_API void NAME##_backward_##SUFFIX(int64_t threads, int64_t rows, int64_t h, T* dx, float* sums, const T* grad,           \
                                       const T* passed, const T* x, const T* weight, const float* mean, const float* scale) { \
    backward<CENTRED>(threads, rows, h, dx, sums, grad, passed, x, weight, mean, scale);                                      \
  }
#define MZ_KERNEL(SUFFIX, T) MZ_NORM(layer_norm, true, SUFFIX, T) MZ_NORM(rms_norm, false, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
