// Sums over the rows of a matrix, in float: the bias gradient of a linear layer.
#include "rows.h"

using namespace mz;

namespace {

template <typename T>
void column_sums(int64_t threads, int64_t rows, int64_t columns, int64_t stride, const T* x, float* result) {
  sum_over_rows<T>(threads, rows, columns, 1, result, [&](int64_t begin, int64_t end, float* sums) {
    add_rows<T, 8>(begin, end, columns, sums, [&](int64_t row, int64_t i, auto at) MZ_LAMBDA { return at.load(x + row * stride + i); });
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                   \
  MZ_API void column_sums_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, int64_t stride, const T* x, float* result) { \
    column_sums(threads, rows, columns, stride, x, result);                                                                    \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
