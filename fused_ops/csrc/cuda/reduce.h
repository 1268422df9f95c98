// Sums and largest values over the threads of a row. Each of these threads gets the result. The order is fixed.
#pragma once

#include "numbers.h"

namespace mz {

struct Sum {
  static MZ_DEVICE float neutral() { return 0.0f; }
  MZ_DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Largest {
  static MZ_DEVICE float neutral() { return -INFINITY; }
  MZ_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over each WIDTH neighbouring threads of a warp.
template <int WIDTH = WARP, typename Of, int N> MZ_DEVICE Floats<N> over_warp(Floats<N> x, const Of& of) {
#pragma unroll
  for (int distance = WIDTH / 2; distance; distance /= 2) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = of(x[k], __shfl_xor_sync(WHOLE_WARP, x[k], distance));
  }
  return x;
}

// N values at once, over GROUP threads with neighbouring threadIdx.x: one warp, or a whole block of several.
template <int GROUP, typename Of, int N> MZ_DEVICE Floats<N> over_group(Floats<N> x, const Of& of) {
  x = over_warp(x, of);
  if constexpr (GROUP > WARP) {
    constexpr int WARPS = GROUP / WARP;
    __shared__ float parts[N][WARPS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    __syncthreads();  // the values of the last call have been read
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < N; ++k) parts[k][warp] = x[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = parts[k][lane % WARPS];
    x = over_warp<WARPS>(x, of);
  }
  return x;
}

// One value of any type, over a block of THREADS in one row, a power of two of them; for all of them. Once in a kernel.
template <int THREADS, typename T, typename Of> MZ_DEVICE T over_block(T x, const Of& of) {
  __shared__ T held[THREADS];
  held[threadIdx.x] = x;
  __syncthreads();
  for (int half = THREADS / 2; half; half /= 2) {
    if ((int)threadIdx.x < half) held[threadIdx.x] = of(held[threadIdx.x], held[threadIdx.x + half]);
    __syncthreads();
  }
  return held[0];
}

template <int GROUP, typename Of> MZ_DEVICE float over_group(float x, const Of& of) { return over_group<GROUP>(Floats<1>{{x}}, of)[0]; }

}  // namespace mz
