// Activations with an optional bias: y = f(x + bias) in one pass, and dx = grad f'(x + bias) with the bias gradient in
// one pass.
#include "activations.h"
#include "rows.h"

using namespace mz;

namespace {

template <typename Act, typename T> void forward(int64_t threads, int64_t rows, int64_t columns, T* y, const T* x, const T* bias) {
  if (!bias)
    return parallel_for(rows * columns, 8192, (int)threads, [&](int64_t begin, int64_t end) {
      map(end - begin, y + begin, [](F x) MZ_LAMBDA { return Act::value(x); }, x + begin);
    });
  parallel_for(rows, grain(columns), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      map(columns, y + row * columns, [](F x, F bias) MZ_LAMBDA { return Act::value(x + bias); }, x + row * columns, bias);
  });
}

template <typename Act, typename T>
void backward(int64_t threads, int64_t rows, int64_t columns, T* dx, float* dbias, const T* grad, const T* x, const T* bias) {
  if (!bias)
    return parallel_for(rows * columns, 8192, (int)threads, [&](int64_t begin, int64_t end) {
      map(end - begin, dx + begin, [](F x, F grad) MZ_LAMBDA { return Act::back(x, grad); }, x + begin, grad + begin);
    });
  sum_over_rows<T>(threads, rows, columns, 1, dbias, [&](int64_t begin, int64_t end, float* sums) {
    add_rows<T, 1>(begin, end, columns, sums, [&](int64_t row, int64_t i, auto at) MZ_LAMBDA {
      auto back = [](F x, F bias, F grad) MZ_LAMBDA { return Act::back(x + bias, grad); };
      auto d = lift(back, at.load(x + row * columns + i), at.load(bias + i), at.load(grad + row * columns + i));
      at.store(dx + row * columns + i, d);
      return d;
    });
  });
}

}  // namespace

#define MZ_ACTIVATION(NAME, ACT, SUFFIX, T)                                                                                   \
  MZ_API void NAME##_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* y, const T* x, const T* bias) {              \
    forward<ACT<T>>(threads, rows, columns, y, x, bias);                                                                         \
  }                                                                                                                           \
  MZ_API void NAME##_backward_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* dx, float* dbias, const T* grad,    \
                                       const T* x, const T* bias) {                                                           \
    backward<ACT<T>>(threads, rows, columns, dx, dbias, grad, x, bias);                                                          \
  }
#define MZ_KERNEL(SUFFIX, T) \
  MZ_ACTIVATION(gelu, Gelu, SUFFIX, T) MZ_ACTIVATION(gelu_tanh, GeluTanh, SUFFIX, T)                            \
  MZ_ACTIVATION(relu, Relu, SUFFIX, T) MZ_ACTIVATION(relu2, Relu2, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
