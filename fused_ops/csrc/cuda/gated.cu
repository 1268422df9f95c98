// f(gate) * up of an activation f, and its two gradients. Rows have strides of their own, so that both inputs may be halves of one tensor.
#include "activations.h"
#include "elements.h"

using namespace mz;

namespace {

template <typename T> struct Inputs {
  const T* gate;
  int64_t gate_stride;
  const T* up;
  int64_t up_stride;
  template <int W> bool in_packs(int64_t columns) const {
    return columns % W == 0 && gate_stride % W == 0 && up_stride % W == 0 && aligned<W>(gate, up);
  }
};

template <typename Act, typename T, int W_> struct Forward {
  static constexpr int W = W_;
  T* y;
  Inputs<T> in;
  int64_t columns;
  MZ_DEVICE void operator()(int64_t row, int64_t column) const {
    Floats<W> gate = load<W>(in.gate + row * in.gate_stride + column), up = load<W>(in.up + row * in.up_stride + column);
    store<W>(y + row * columns + column, map([](float x, float u) { return Act::value(x) * u; }, gate, up));
  }
};

// (The compiler merges the two equal exponentials of the gate.)
template <typename Act, typename T, int W_> struct Backward {
  static constexpr int W = W_;
  T *dgate, *dup;
  int64_t stride;
  const T* grad;
  Inputs<T> in;
  int64_t columns;
  MZ_DEVICE void operator()(int64_t row, int64_t column) const {
    Floats<W> gate = load<W>(in.gate + row * in.gate_stride + column), up = load<W>(in.up + row * in.up_stride + column);
    Floats<W> d = load<W>(grad + row * columns + column), to_gate, to_up;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      to_up[j] = Act::value(gate[j]) * d[j];
      to_gate[j] = Act::back(gate[j], d[j]) * up[j];
    }
    store<W>(dgate + row * stride + column, to_gate);
    store<W>(dup + row * stride + column, to_up);
  }
};

}  // namespace

#define MZ_GATED(NAME, ACT, SUFFIX, T)                                                                                                  \
  MZ_API int NAME##_##SUFFIX(Launch* to, int64_t rows, int64_t columns, T* y, const T* gate, int64_t gate_stride, const T* up,          \
                             int64_t up_stride) {                                                                                       \
    constexpr int W = WIDEST<T>;                                                                                                        \
    Inputs<T> in{gate, gate_stride, up, up_stride};                                                                                     \
    if (in.in_packs<W>(columns) && aligned<W>(y)) return each_element(*to, Forward<ACT<T>, T, W>{y, in, columns}, rows, columns);       \
    return each_element(*to, Forward<ACT<T>, T, 1>{y, in, columns}, rows, columns);                                                     \
  }                                                                                                                                     \
  MZ_API int NAME##_backward_##SUFFIX(Launch* to, int64_t rows, int64_t columns, T* dgate, T* dup, int64_t stride, const T* grad,       \
                                      const T* gate, int64_t gate_stride, const T* up, int64_t up_stride) {                             \
    constexpr int W = WIDEST<T>;                                                                                                        \
    Inputs<T> in{gate, gate_stride, up, up_stride};                                                                                     \
    if (in.in_packs<W>(columns) && stride % W == 0 && aligned<W>(dgate, dup, grad))                                                     \
      return each_element(*to, Backward<ACT<T>, T, W>{dgate, dup, stride, grad, in, columns}, rows, columns);                           \
    return each_element(*to, Backward<ACT<T>, T, 1>{dgate, dup, stride, grad, in, columns}, rows, columns);                             \
  }
#define MZ_KERNEL(SUFFIX, T) \
  MZ_GATED(swiglu, Silu, SUFFIX, T) MZ_GATED(geglu, Gelu, SUFFIX, T) MZ_GATED(geglu_tanh, GeluTanh, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
