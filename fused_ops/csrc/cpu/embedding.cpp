// Adds gradient rows to the rows of an fp32 table. Threads divide the columns among them, so every row is summed in the
// order of the tokens whatever the number of threads.
#include "rows.h"

using namespace mz;

namespace {

template <typename T> void add_rows(int64_t threads, int64_t tokens, int64_t columns, float* into, const int64_t* ids, const T* grad) {
  int64_t vectors = (columns + LANES - 1) / LANES;
  parallel_for(vectors, std::max<int64_t>(1, 8192 / std::max<int64_t>(tokens, 1)), (int)threads, [&](int64_t begin, int64_t end) {
    int64_t first = begin * LANES, count = std::min(end * LANES, columns) - first;
    for (int64_t token = 0; token < tokens; ++token) {
      float* row = into + ids[token] * columns + first;
      const T* g = grad + token * columns + first;
      each_vector(count, [&](int64_t i, int64_t n) MZ_LAMBDA { store(row + i, load(row + i, n) + load(g + i, n), n); });
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void embedding_gradient_##SUFFIX(int64_t threads, int64_t tokens, int64_t columns, float* into, const int64_t* ids,  \
                                          const T* grad) {                                                                    \
    add_rows(threads, tokens, columns, into, ids, grad);                                                                      \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
