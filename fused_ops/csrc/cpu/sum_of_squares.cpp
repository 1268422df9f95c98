// Sum of squares in double. Blocks of fixed size are summed separately, and then their sums in order. So the result
// does not depend on the number of threads.
#include "kernel.h"

using namespace mz;

namespace {

constexpr int64_t BLOCK = 1 << 15;

template <typename T> double of_block(const T* x, int64_t n) {
  double sums[LANES] = {};
  for (int64_t i = 0; i < n; i += LANES) {
    float v[LANES];
    store(v, load(x + i, n - i));
    for (int j = 0; j < LANES; ++j) sums[j] += (double)v[j] * v[j];
  }
  for (int step = LANES / 2; step; step /= 2)
    for (int j = 0; j < step; ++j) sums[j] += sums[j + step];
  return sums[0];
}

template <typename T> void sum_of_squares(int64_t threads, int64_t n, const T* x, double* result) {
  int64_t blocks = (n + BLOCK - 1) / BLOCK;
  std::vector<double> partial(blocks);
  parallel_for(blocks, 1, (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) partial[b] = of_block(x + b * BLOCK, std::min(BLOCK, n - b * BLOCK));
  });
  double total = 0;
  for (double p : partial) total += p;
  *result = total;
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T) \
  MZ_API void sum_of_squares_##SUFFIX(int64_t threads, int64_t n, const T* x, double* result) { sum_of_squares(threads, n, x, result); }
MZ_FOR_DTYPES(MZ_KERNEL)
