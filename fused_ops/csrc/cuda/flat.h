// Kernels over flat arrays: whole packs from the first place at which all arrays are aligned, and single elements before and behind.
#pragma once

#include "launch.h"
#include "numbers.h"

namespace mz {

// Elements before the first place where packs of W of every array are aligned, at most W - 1; `n` where there is no such place.
template <int W, typename... T> int64_t elements_ahead(int64_t n, const T*... arrays) {
  for (int64_t ahead = 0; ahead < W && ahead < n; ++ahead)
    if ((aligned<W>(arrays ? arrays + ahead : arrays) && ...)) return ahead;
  return n;
}

}  // namespace mz
