// f(gate) * up of an activation f. Rows have strides of their own, so that both inputs, and both gradients, may be halves
// of one tensor.
#include "activations.h"
#include "rows.h"

using namespace mz;

namespace {

template <typename Act, typename T>
void forward(int64_t threads, int64_t rows, int64_t columns, T* y, const T* gate, int64_t gate_stride, const T* up, int64_t up_stride) {
  parallel_for(rows, grain(columns), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *g = gate + row * gate_stride, *u = up + row * up_stride;
      T* out = y + row * columns;
      map(columns, out, [](F x, F upper) MZ_LAMBDA { return Act::value(x) * upper; }, g, u);
    }
  });
}

// Rows of the gradients are `stride` apart. (The compiler merges the two equal exponentials of x.)
template <typename Act, typename T>
void backward(int64_t threads, int64_t rows, int64_t columns, T* dgate, T* dup, int64_t stride, const T* grad, const T* gate,
              int64_t gate_stride, const T* up, int64_t up_stride) {
  parallel_for(rows, grain(columns), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *g = gate + row * gate_stride, *u = up + row * up_stride, *d = grad + row * columns;
      T *to_gate = dgate + row * stride, *to_up = dup + row * stride;
      each_part<T>(columns, [&](int64_t i, auto at) MZ_LAMBDA {
        auto x = at.load(g + i), in = at.load(d + i), upper = at.load(u + i);
        at.store(to_up + i, lift([](F x, F in) MZ_LAMBDA { return Act::value(x) * in; }, x, in));
        at.store(to_gate + i, lift([](F x, F in, F upper) MZ_LAMBDA { return Act::back(x, in) * upper; }, x, in, upper));
      });
    }
  });
}

}  // namespace

#define MZ_GATED(NAME, ACT, SUFFIX, T)                                                                                        \
  MZ_API void NAME##_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* y, const T* gate, int64_t gate_stride,       \
                              const T* up, int64_t up_stride) {                                                               \
    forward<ACT<T>>(threads, rows, columns, y, gate, gate_stride, up, up_stride);                                             \
  }                                                                                                                           \
  MZ_API void NAME##_backward_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* dgate, T* dup, int64_t stride,      \
                                       const T* grad, const T* gate, int64_t gate_stride, const T* up, int64_t up_stride) {   \
    backward<ACT<T>>(threads, rows, columns, dgate, dup, stride, grad, gate, gate_stride, up, up_stride);                     \
  }
#define MZ_KERNEL(SUFFIX, T) \
  MZ_GATED(swiglu, Silu, SUFFIX, T) MZ_GATED(geglu, Gelu, SUFFIX, T) MZ_GATED(geglu_tanh, GeluTanh, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
