// Non-linearities of the feed-forward layer with the bias added before them; the bias gradient is summed in the same pass.
#include "activations.h"
#include "columns.h"
#include "elements.h"

using namespace mz;

namespace {

template <typename Act, typename T, int W_> struct Forward {
  static constexpr int W = W_;
  T* y;
  const T *x, *bias;
  int64_t columns;
  MZ_DEVICE void operator()(int64_t row, int64_t column) const {
    Floats<W> value = load<W>(x + row * columns + column);
    if (bias) value = value + load<W>(bias + column);
    store<W>(y + row * columns + column, map([](float v) { return Act::value(v); }, value));
  }
};

// dx and its part of the bias gradient.
template <typename Act, typename T, int W_> struct Backward {
  static constexpr int W = W_, ARRAYS = 1, AHEAD = 1;
  struct Inputs { Words<T, W> x, grad; };
  T* dx;
  const T *grad, *x, *bias;
  int64_t columns;
  MZ_DEVICE Inputs read(int64_t row, int64_t column) const {
    return {fetch<W>(x + row * columns + column), fetch<W>(grad + row * columns + column)};
  }
  MZ_DEVICE Sums<1, W> operator()(const Inputs& of, int64_t row, int64_t column) const {
    Floats<W> value = widened(of.x);
    if (bias) value = value + load<W>(bias + column);
    Floats<W> result = map([](float v, float g) { return Act::back(v, g); }, value, widened(of.grad));
    store<W>(dx + row * columns + column, result);
    return {{result}};
  }
  MZ_DEVICE void operator()(int64_t row, int64_t column) const { (*this)(read(row, column), row, column); }
};

template <typename Act, typename T, int W>
int backward(Launch& to, int64_t rows, int64_t columns, T* dx, float* dbias, const T* grad, const T* x, const T* bias) {
  if (bias) return sum_over_rows(to, Backward<Act, T, W>{dx, grad, x, bias, columns}, rows, columns, dbias);
  return each_element(to, Backward<Act, T, W>{dx, grad, x, bias, columns}, rows, columns);
}

}  // namespace

#define MZ_ACTIVATION(NAME, ACT, SUFFIX, T)                                                                                          \
  MZ_API int NAME##_##SUFFIX(Launch* to, int64_t rows, int64_t columns, T* y, const T* x, const T* bias) {                           \
    if (!bias) columns *= rows, rows = 1; /* without one it is one long row */                                                       \
    if (columns % WIDEST<T> == 0 && aligned<WIDEST<T>>(y, x, bias))                                                                  \
      return each_element(*to, Forward<ACT<T>, T, WIDEST<T>>{y, x, bias, columns}, rows, columns);                                      \
    return each_element(*to, Forward<ACT<T>, T, 1>{y, x, bias, columns}, rows, columns);                                                \
  }                                                                                                                                  \
  MZ_API int NAME##_backward_##SUFFIX(Launch* to, int64_t rows, int64_t columns, T* dx, float* dbias, const T* grad, const T* x,     \
                                      const T* bias) {                                                                               \
    if (!bias) columns *= rows, rows = 1;                                                                                            \
    if (columns % WIDEST<T> == 0 && aligned<WIDEST<T>>(dx, grad, x, bias))                                                           \
      return backward<ACT<T>, T, WIDEST<T>>(*to, rows, columns, dx, dbias, grad, x, bias);                                              \
    return backward<ACT<T>, T, 1>(*to, rows, columns, dx, dbias, grad, x, bias);                                                        \
  }
#define MZ_KERNEL(SUFFIX, T) \
  MZ_ACTIVATION(gelu, Gelu, SUFFIX, T) MZ_ACTIVATION(gelu_tanh, GeluTanh, SUFFIX, T)                            \
  MZ_ACTIVATION(relu, Relu, SUFFIX, T) MZ_ACTIVATION(relu2, Relu2, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
