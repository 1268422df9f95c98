// LayerNorm and RMSNorm, alone or of a sum of two tensors, and their backward. A row stays in the first cache over its passes; the mean
// is taken before the squares of the distances from it, so that a large mean costs no digits.
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
    each_vector(h, [&](int64_t i, int64_t n) MZ_LAMBDA { total += load(x + i, n); });
    *mean = centre = sum(total) / h;
  }
  F squares = splat(0.0f);
  each_vector(h, [&](int64_t i, int64_t n) MZ_LAMBDA {
    F distance = first_lanes(load(x + i, n) - centre, n, 0.0f);
    squares += distance * distance;
  });
  float factor = *scale = 1.0f / __builtin_sqrtf(sum(squares) / h + eps);
  each_vector(h, [&](int64_t i, int64_t n) MZ_LAMBDA {
    F value = (load(x + i, n) - centre) * factor * load(weight + i, n);
    store(y + i, CENTRED ? value + load(bias + i, n) : value, n);
  });
}

// residual: added to x into `total` first, whose rounded values are what is normalised.
template <bool CENTRED, typename T>
void forward(int64_t threads, int64_t rows, int64_t h, T* y, T* total, const T* x, const T* residual, const T* weight, const T* bias,
             float* mean, float* scale, float eps) {
  parallel_for(rows, grain(h), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in = x + row * h;
      if (residual) {
        const T* other = residual + row * h;
        T* out = total + row * h;
        each_vector(h, [&](int64_t i, int64_t n) MZ_LAMBDA { store(out + i, load(in + i, n) + load(other + i, n), n); });
        in = out;
      }
      normalise_row<CENTRED>(h, y + row * h, in, weight, bias, eps, CENTRED ? mean + row : nullptr, scale + row);
    }
  });
}

// With u = (x - mean) scale and d = grad weight: dx = scale (d - mean(d) - u mean(d u)) (+ passed, the gradient of the sum itself);
// weight gradient sum of grad u, bias gradient sum of grad. `sums` holds both, the weight's first.
template <bool CENTRED, typename T>
void backward(int64_t threads, int64_t rows, int64_t h, T* dx, float* sums, const T* grad, const T* passed, const T* x, const T* weight,
              const float* mean, const float* scale) {
  sum_over_rows(threads, rows, CENTRED ? 2 * h : h, sums, [&](int64_t begin, int64_t end, float* own) {
    for (int64_t row = begin; row < end; ++row) {
      const T *in = x + row * h, *g = grad + row * h, *other = passed ? passed + row * h : nullptr;
      T* out = dx + row * h;
      float centre = CENTRED ? mean[row] : 0.0f, factor = scale[row];
      F first = splat(0.0f), second = splat(0.0f);
      each_vector(h, [&](int64_t i, int64_t n) MZ_LAMBDA {
        F unit = (load(in + i, n) - centre) * factor, incoming = load(g + i, n), weighted = incoming * load(weight + i, n);
        if (CENTRED) first += weighted;
        second += first_lanes(weighted * unit, n, 0.0f);
        store(own + i, load(own + i, n) + incoming * unit, n);
        if (CENTRED) store(own + h + i, load(own + h + i, n) + incoming, n);
      });
      float mean_d = CENTRED ? sum(first) / h : 0.0f, mean_du = sum(second) / h;
      each_vector(h, [&](int64_t i, int64_t n) MZ_LAMBDA {
        F unit = (load(in + i, n) - centre) * factor;
        F d = (load(g + i, n) * load(weight + i, n) - mean_d - unit * mean_du) * factor;
        store(out + i, other ? d + load(other + i, n) : d, n);
      });
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
