// The language of kernels: CUDA's, or under any other compiler its emulation for the tests.
#pragma once

#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define MZ_ALIGNED(pointer, alignment)
#define MZ_PLACED(alignment) __align__(alignment)
#else
#include "emulation.h"
#endif

#define MZ_DEVICE __device__ __forceinline__
// At least 512 threads per multiprocessor, so at most 128 registers per thread. By default the compiler limits them
// further.
#define MZ_BOUNDS(threads) __launch_bounds__(threads, 512 / (threads))
#define MZ_API extern "C" __attribute__((visibility("default")))

// MZ_FOR_DTYPES(M): M(suffix, type) for every storage type.
#define MZ_FOR_DTYPES(M) M(f32, float) M(bf16, mz::bf16) M(fp16, mz::fp16)

namespace mz {

constexpr int WARP = 32;
constexpr unsigned WHOLE_WARP = 0xFFFFFFFFu;
constexpr float LOG2_E = 1.44269504088896341f;

template <typename T> __host__ __device__ constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <typename T> __host__ __device__ constexpr T larger(T a, T b) { return a > b ? a : b; }
__host__ __device__ constexpr int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

}  // namespace mz
