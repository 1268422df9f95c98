// LayerNorm and RMSNorm, alone or of a sum of two tensors, and their backward. A row stays in the first-level cache
// over its passes. The variance is computed from the distances to the mean, so that a large mean does not cost
// precision.
//
// Statistics per row: mean (LayerNorm only) and scale = 1 / sqrt(variance + eps).
#include "norm_rows.h"

using namespace mz;

namespace {

// residual: total = x + residual is computed first; its rounded values are normalised.
template <bool CENTRED, typename T>
void forward(int64_t threads, int64_t rows, int64_t h, T* y, T* total, const T* x, const T* residual, const T* weight, const T* bias,
             float* mean, float* scale, float eps, float offset) {
  parallel_for(rows, grain(h), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in = x + row * h;
      if (residual) {
        const T* other = residual + row * h;
        T* out = total + row * h;
        map(h, out, plus, in, other);
        in = out;
      }
      normalise_row<CENTRED>(h, y + row * h, in, weight, bias, offset, eps, CENTRED ? mean + row : nullptr, scale + row);
    }
  });
}

// `sums` holds the gradients of weight and bias, sums over rows.
template <bool CENTRED, typename T>
void backward(int64_t threads, int64_t rows, int64_t h, T* dx, float* sums, const T* grad, const T* passed, const T* x, const T* weight,
              const float* mean, const float* scale, float offset) {
  sum_over_rows<T>(threads, rows, h, CENTRED ? 2 : 1, sums, [&](int64_t begin, int64_t end, float* own) {
    for (int64_t row = begin; row < end; ++row)
      normalise_row_backward<CENTRED>(h, dx + row * h, own, grad + row * h, passed ? passed + row * h : nullptr, x + row * h, weight,
                                      offset, CENTRED ? mean[row] : 0.0f, scale[row]);
  });
}

}  // namespace

#define MZ_NORM(NAME, CENTRED, SUFFIX, T)                                                                                     \
  MZ_API void NAME##_##SUFFIX(int64_t threads, int64_t rows, int64_t h, T* y, T* total, const T* x, const T* residual,        \
                              const T* weight, const T* bias, float* mean, float* scale, float eps, float offset) {           \
    forward<CENTRED>(threads, rows, h, y, total, x, residual, weight, bias, mean, scale, eps, offset);                        \
  }                                                                                                                           \
  MZ_API void NAME##_backward_##SUFFIX(int64_t threads, int64_t rows, int64_t h, T* dx, float* sums, const T* grad,           \
                                       const T* passed, const T* x, const T* weight, const float* mean, const float* scale,   \
                                       float offset) {                                                                        \
    backward<CENTRED>(threads, rows, h, dx, sums, grad, passed, x, weight, mean, scale, offset);                              \
  }
#define MZ_KERNEL(SUFFIX, T) MZ_NORM(layer_norm, true, SUFFIX, T) MZ_NORM(rms_norm, false, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
