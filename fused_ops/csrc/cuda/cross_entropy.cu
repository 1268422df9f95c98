// The two passes of a vocabulary-parallel cross-entropy over rows of logits: one reading for a row's statistics, and
// the gradient in place.
//
// Rows are long: a block takes one row, and each of its threads every 512th pack. The elements before the first aligned
// pack and those at the end are processed one by one.
#include "launch.h"
#include "reduce.h"

using namespace mz;

namespace {

constexpr int THREADS = 512;
// Three blocks of a multiprocessor: while one adds up its row, two read. So at most 42 registers per thread. Turing has
// room for two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int RESIDENT = 2;
#else
constexpr int RESIDENT = 3;
#endif

// Calls body(column, loaded pack) for all columns of [0, n): packs of the widest access where the row allows them.
template <typename T, typename Body> MZ_DEVICE void each_logit(const T* x, int64_t n, const Body& body) {
  constexpr int W = WIDEST<T>;
  int64_t ahead = smaller<int64_t>(n, (-(int64_t)(reinterpret_cast<uintptr_t>(x) / sizeof(T))) & (W - 1));
  int64_t packed = ahead + (n - ahead) / W * W;
  if (threadIdx.x < ahead) body((int64_t)threadIdx.x, load<1>(x + threadIdx.x));
  int64_t i = ahead + (int64_t)threadIdx.x * W;
  for (; i + THREADS * W < packed; i += 2 * THREADS * W) {  // both are on their way before the first is written
    Floats<W> first = load<W>(x + i), second = load<W>(x + i + THREADS * W);
    body(i, first), body(i + THREADS * W, second);
  }
  if (i < packed) body(i, load<W>(x + i));
  if (packed + threadIdx.x < n) body(packed + threadIdx.x, load<1>(x + packed + threadIdx.x));
}

// The sum of exponentials so far, relative to the largest value so far, if that is finite.
struct Running {
  float largest = -INFINITY, exponentials = 0.0f;
  MZ_DEVICE float base() const { return fmaxf(largest, -3.402823466e38f); }
  MZ_DEVICE void grow(float to) {
    if (to > largest) {
      float before = base();
      largest = to;
      exponentials *= power_of_two((before - base()) * LOG2_E);
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    statistics(int64_t stride, int64_t real, const T* logits, const int64_t* target, float* largest, float* sums, bool summed) {
  int64_t row = blockIdx.x, rows = gridDim.x;
  const T* x = logits + row * stride;
  Running own;
  float logit_sum = 0.0f, of_label = threadIdx.x == 0 && target[row] >= 0 ? widened(x[target[row]]) : 0.0f;
  each_logit(x, real, [&](int64_t, const auto& pack) {
    constexpr int W = sizeof(pack) / sizeof(float);
    float top = pack[0];
#pragma unroll
    for (int j = 1; j < W; ++j) top = fmaxf(top, pack[j]);
    own.grow(top);
    float base = own.base();
#pragma unroll
    for (int j = 0; j < W; ++j) {
      own.exponentials += power_of_two((pack[j] - base) * LOG2_E);
      logit_sum += pack[j];
    }
  });
  float top = over_group<THREADS>(own.largest, Largest());
  own.grow(top);
  Floats<2> both = over_group<THREADS>(Floats<2>{{own.exponentials, logit_sum}}, Sum());
  if (threadIdx.x == 0) {
    largest[row] = top;
    sums[row] = both[0];
    sums[rows + row] = of_label;
    if (summed) sums[2 * rows + row] = both[1];
  }
}

template <typename T> struct Loss {
  int64_t columns, stride, real;
  T* logits;
  const int64_t* target;
  const float *log_normaliser, *weight, *smooth, *hit;
};

// exp(x - log_normaliser) weight - smooth, plus `hit` at the label; 0 in padding columns.
template <typename T> __global__ void __launch_bounds__(THREADS, RESIDENT) gradient(Loss<T> k) {
  int64_t row = blockIdx.x, label = k.target[row];
  T* x = k.logits + row * k.stride;
  float shift = k.log_normaliser[row], factor = k.weight[row], less = k.smooth ? k.smooth[row] : 0.0f, hit = k.hit[row];
  each_logit(x, k.real, [&](int64_t i, auto pack) {
    constexpr int W = sizeof(pack) / sizeof(float);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      pack[j] = power_of_two((pack[j] - shift) * LOG2_E) * factor - less;
      if (i + j == label) pack[j] += hit;
    }
    store<W>(x + i, pack);
  });
  for (int64_t i = k.real + threadIdx.x; i < k.columns; i += THREADS) store<1>(x + i, all_of<1>(0.0f));
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                        \
  MZ_API int row_statistics_##SUFFIX(Launch* to, int64_t rows, int64_t stride, int64_t real, const T* logits, const int64_t* target, \
                                     float* largest, float* sums, int64_t summed) {                                                 \
    if (!rows) return cudaSuccess;                                                                                                  \
    return launch(*to, statistics<T>, dim3((unsigned)rows), dim3(THREADS), stride, real, logits, target, largest, sums, summed != 0); \
  }                                                                                                                                 \
  MZ_API int write_gradient_##SUFFIX(Launch* to, int64_t rows, int64_t columns, int64_t stride, int64_t real, T* logits,            \
                                     const int64_t* target, const float* log_normaliser, const float* weight, const float* smooth,  \
                                     const float* hit) {                                                                            \
    Loss<T> k{columns, stride, real, logits, target, log_normaliser, weight, smooth, hit};                                          \
    return rows ? launch(*to, gradient<T>, dim3((unsigned)rows), dim3(THREADS), k) : cudaSuccess;                                   \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
