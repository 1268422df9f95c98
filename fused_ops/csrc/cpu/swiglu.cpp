// silu(gate) * up. Rows have strides of their own, so that both inputs, and both gradients, may be halves of one tensor.
#include "rows.h"

using namespace mz;

namespace {

template <typename T>
void forward(int64_t threads, int64_t rows, int64_t columns, T* y, const T* gate, int64_t gate_stride, const T* up, int64_t up_stride) {
  parallel_for(rows, grain(columns), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *g = gate + row * gate_stride, *u = up + row * up_stride;
      T* out = y + row * columns;
      each_vector(columns, [&](int64_t i, int64_t n) MZ_LAMBDA {
        F x = load(g + i, n);
        store(out + i, x * sigmoid(x) * load(u + i, n), n);
      });
    }
  });
}

// d silu(x)/dx = s + x s (1 - s). The gradients lie in rows of `stride`.
template <typename T>
void backward(int64_t threads, int64_t rows, int64_t columns, T* dgate, T* dup, int64_t stride, const T* grad, const T* gate,
              int64_t gate_stride, const T* up, int64_t up_stride) {
  parallel_for(rows, grain(columns), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *g = gate + row * gate_stride, *u = up + row * up_stride, *d = grad + row * columns;
      T *to_gate = dgate + row * stride, *to_up = dup + row * stride;
      each_vector(columns, [&](int64_t i, int64_t n) MZ_LAMBDA {
        F x = load(g + i, n), in = load(d + i, n);
        F s = sigmoid(x), silu = x * s;
        F upper = load(u + i, n);
        store(to_up + i, silu * in, n);
        store(to_gate + i, (s + silu * (1.0f - s)) * in * upper, n);
      });
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void swiglu_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* y, const T* gate, int64_t gate_stride,       \
                              const T* up, int64_t up_stride) {                                                               \
    forward(threads, rows, columns, y, gate, gate_stride, up, up_stride);                                                     \
  }                                                                                                                           \
  MZ_API void swiglu_backward_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* dgate, T* dup, int64_t stride,      \
                                       const T* grad, const T* gate, int64_t gate_stride, const T* up, int64_t up_stride) {   \
    backward(threads, rows, columns, dgate, dup, stride, grad, gate, gate_stride, up, up_stride);                             \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
