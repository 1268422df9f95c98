// Macros that make a C function of a kernel, and loops that divide its work among threads.
//
// Kernels have a C interface (pointers, sizes, numbers) and include no header of torch, so that one build serves every
// torch. `name_f32`, `name_bf16`, `name_fp16` are its instances. Nothing here allocates beyond a thread's stack or
// small scratch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vec.h"

#define MZ_API extern "C" __attribute__((visibility("default")))

// MZ_FOR_DTYPES(M): M(suffix, type) for every storage type.
#define MZ_FOR_DTYPES(M) M(f32, float) M(bf16, mz::bf16) M(fp16, mz::fp16)

namespace mz {

// Calls body(begin, end) on contiguous shares of [0, n), at least `grain` items each, on up to `threads` threads.
template <typename Body> void parallel_for(int64_t n, int64_t grain, int threads, const Body& body) {
  int64_t most = std::max<int64_t>(1, std::min<int64_t>(threads, n / std::max<int64_t>(grain, 1)));
  if (most == 1) {
    if (n > 0) body(int64_t(0), n);
    return;
  }
#pragma omp parallel for num_threads((int)most) schedule(static)
  for (int64_t part = 0; part < most; ++part) body(n * part / most, n * (part + 1) / most);
}

// As parallel_for, but one item at a time to whichever thread is free: for items of unequal cost.
template <typename Body> void parallel_each(int64_t n, int threads, const Body& body) {
  int most = (int)std::max<int64_t>(1, std::min<int64_t>(threads, n));
  if (most == 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
#pragma omp parallel for num_threads(most) schedule(dynamic, 1)
  for (int64_t i = 0; i < n; ++i) body(i);
}

}  // namespace mz
