// Adds gradient rows to the rows of an fp32 table. The tokens are sorted by id, and those of one id keep their order.
// The thread at the first token of an id finds the last one and adds all of its rows. So additions are in the order of
// the tokens, and no two threads write to the same place.
#include "launch.h"
#include "numbers.h"

using namespace mz;

namespace {

constexpr int THREADS = 128;

// The first place behind `first` with another id.
MZ_DEVICE int64_t end_of_run(const int64_t* ids, int64_t first, int64_t tokens) {
  int64_t inside = first, outside = first + 1, id = ids[first];
  for (int64_t step = 1; outside < tokens && ids[outside] == id; step *= 2) inside = outside, outside = smaller(tokens, outside + step);
  while (outside - inside > 1) {
    int64_t middle = inside + (outside - inside) / 2;
    if (ids[middle] == id) inside = middle;
    else outside = middle;
  }
  return outside;
}

// ids: sorted. order[i]: the i-th token in that order. Ids outside the table are skipped; the forward lookup has failed
// on them.
template <typename T, int W>
__global__ void MZ_BOUNDS(THREADS)
    add_rows(int64_t tokens, int64_t rows, int64_t columns, float* into, const int64_t* ids, const int64_t* order, const T* grad) {
  int64_t first = blockIdx.x, id = ids[first];
  if (id < 0 || id >= rows || (first > 0 && ids[first - 1] == id)) return;
  int64_t end = end_of_run(ids, first, tokens);
  for (int64_t column = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * W; column < columns; column += (int64_t)gridDim.y * THREADS * W) {
    Floats<W> total = load<W>(into + id * columns + column);
#pragma unroll 8
    for (int64_t i = first; i < end; ++i) total = total + load<W>(grad + order[i] * columns + column);
    store<W>(into + id * columns + column, total);
  }
}

template <typename T, int W>
int run(const Launch& to, int64_t tokens, int64_t rows, int64_t columns, float* into, const int64_t* ids, const int64_t* order, const T* grad) {
  dim3 grid((unsigned)tokens, (unsigned)smaller<int64_t>(64, parts_of(columns, THREADS * W)));
  return launch(to, add_rows<T, W>, grid, dim3(THREADS), tokens, rows, columns, into, ids, order, grad);
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                           \
  MZ_API int embedding_gradient_sorted_##SUFFIX(Launch* to, int64_t tokens, int64_t rows, int64_t columns, float* into,                \
                                                const int64_t* ids, const int64_t* order, const T* grad) {                             \
    constexpr int W = WIDEST<T>;                                                                                                       \
    if (columns % W == 0 && aligned<W>(into) && aligned<W>(grad)) return run<T, W>(*to, tokens, rows, columns, into, ids, order, grad); \
    return run<T, 1>(*to, tokens, rows, columns, into, ids, order, grad);                                                              \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
