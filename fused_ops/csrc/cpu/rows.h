// Loops over a row in vectors, and sums over rows whose order does not depend on the number of threads.
#pragma once

#include "kernel.h"

#define MZ_LAMBDA __attribute__((always_inline))

namespace mz {

// body(i, lanes) for i = 0, 16, ...: `lanes` is the constant 16 but for a last, partial vector.
template <typename Body> MZ_INLINE void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) body(i, int64_t(LANES));
  if (i < n) body(i, n - i);
}

// Rows of one block: at most 64 blocks, of at least 32 rows.
MZ_INLINE int64_t block_rows(int64_t rows) { return std::max<int64_t>(32, (rows + 63) / 64); }

// Runs of whole rows for a thread: small tensors are not worth waking one.
MZ_INLINE int64_t grain(int64_t columns) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(columns, 1)); }

// Calls body(first row, last row + 1, sums) for each fixed block of rows; `sums` are `columns` zeros of that block alone, which the body
// adds to. Then adds up the blocks' sums in order into `result`.
template <typename Body>
void sum_over_rows(int64_t threads, int64_t rows, int64_t columns, float* result, const Body& body) {
  int64_t size = block_rows(rows), blocks = (rows + size - 1) / size;
  std::vector<float> partial(blocks * columns);
  parallel_for(blocks, 1, (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) body(b * size, std::min(rows, (b + 1) * size), partial.data() + b * columns);
  });
  parallel_for(columns, 4096, (int)threads, [&](int64_t begin, int64_t end) {
    each_vector(end - begin, [&](int64_t i, int64_t n) MZ_LAMBDA {
      F total = splat(0.0f);
      for (int64_t b = 0; b < blocks; ++b) total += load(partial.data() + b * columns + begin + i, n);
      store(result + begin + i, total, n);
    });
  });
}

}  // namespace mz
