// Sums over the rows of a matrix, in float: the bias gradient of a linear layer.
#include "rows.h"

using namespace mz;

namespace {

template <typename T>
void column_sums(int64_t threads, int64_t rows, int64_t columns, int64_t stride, const T* x, float* result) {
  sum_over_rows(threads, rows, columns, result, [&](int64_t begin, int64_t end, float* sums) {
    for (int64_t row = begin; row < end; ++row)
      each_vector(columns, [&](int64_t i, int64_t n) MZ_LAMBDA { store(sums + i, load(sums + i, n) + load(x + row * stride + i, n), n); });
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                   \
  MZ_API void column_sums_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, int64_t stride, const T* x, float* result) { \
    column_sums(threads, rows, columns, stride, x, result);                                                                    \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
