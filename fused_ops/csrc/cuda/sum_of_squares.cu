// Sum of squares in double. Blocks of fixed size are summed separately, and their sums by one block. So the order of
// additions depends only on the length and the alignment. The host reads nothing back.
#include "flat.h"
#include "reduce.h"

using namespace mz;

namespace {

constexpr int THREADS = 256;
constexpr int64_t CHUNK = 1 << 16;  // elements of a block

struct Plus {
  MZ_DEVICE double operator()(double a, double b) const { return a + b; }
};

template <int W, typename T> MZ_DEVICE double squares(const T* x) {
  Floats<W> value = load<W>(x);
  double total = 0;
#pragma unroll
  for (int j = 0; j < W; ++j) total += (double)value[j] * value[j];
  return total;
}

template <typename T> __global__ void MZ_BOUNDS(THREADS) of_chunk(const T* x, int64_t n, int64_t ahead, double* partial) {
  constexpr int W = WIDEST<T>;
  int64_t packs = (n - ahead) / W, packed = ahead + packs * W, first = blockIdx.x * (CHUNK / W);
  int64_t last = smaller<int64_t>(first + CHUNK / W, packs);
  double total = 0;
#pragma unroll 4
  for (int64_t i = first + threadIdx.x; i < last; i += THREADS) total += squares<W>(x + ahead + i * W);
  // Elements outside of packs are divided among all blocks.
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < ahead + n - packed; i += (int64_t)gridDim.x * THREADS)
    total += squares<1>(x + (i < ahead ? i : packed + i - ahead));
  total = over_block<THREADS>(total, Plus());
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

static __global__ void MZ_BOUNDS(THREADS) of_chunks(const double* partial, int64_t chunks, double* result) {
  double total = 0;
  for (int64_t i = threadIdx.x; i < chunks; i += THREADS) total += partial[i];
  total = over_block<THREADS>(total, Plus());
  if (threadIdx.x == 0) *result = total;
}

template <typename T> int sum_of_squares(Launch& to, int64_t n, const T* x, double* result) {
  int64_t chunks = larger<int64_t>(1, parts_of(n, CHUNK));
  double* partial = scratch<double>(to, chunks);
  if (!partial) return MORE_SCRATCH;
  int error = launch(to, of_chunk<T>, dim3((unsigned)chunks), dim3(THREADS), x, n, elements_ahead<WIDEST<T>>(n, x), partial);
  return error ? error : launch(to, of_chunks, dim3(1), dim3(THREADS), partial, chunks, result);
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T) \
  MZ_API int sum_of_squares_##SUFFIX(Launch* to, int64_t n, const T* x, double* result) { return sum_of_squares(*to, n, x, result); }
MZ_FOR_DTYPES(MZ_KERNEL)
