// Sums over the rows of a matrix, in float: the bias gradient of a linear layer.
#include "columns.h"

using namespace mz;

namespace {

template <typename T, int W_> struct Column {
  static constexpr int W = W_, ARRAYS = 1, AHEAD = 4;
  const T* x;
  int64_t stride;
  typedef Words<T, W> Inputs;
  MZ_DEVICE Inputs read(int64_t row, int64_t column) const { return fetch<W>(x + row * stride + column); }
  MZ_DEVICE Sums<1, W> operator()(const Inputs& x, int64_t, int64_t) const { return {{widened(x)}}; }
};

template <typename T> int column_sums(Launch& to, int64_t rows, int64_t columns, int64_t stride, const T* x, float* result) {
  constexpr int W = WIDEST<T>;
  if (aligned<W>(x) && columns % W == 0 && stride % W == 0) return sum_over_rows(to, Column<T, W>{x, stride}, rows, columns, result);
  return sum_over_rows(to, Column<T, 1>{x, stride}, rows, columns, result);
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                              \
  MZ_API int column_sums_##SUFFIX(Launch* to, int64_t rows, int64_t columns, int64_t stride, const T* x, float* result) { \
    return column_sums(*to, rows, columns, stride, x, result);                                                            \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
