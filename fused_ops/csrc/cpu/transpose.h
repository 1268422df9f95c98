// The transpose of as many registers as a register has lanes, of four bytes each.
#pragma once

#include <utility>

#include "vec.h"

namespace mz {

// One round: every pair of registers STEP apart exchanges every other STEP lanes. L... are the lanes.
template <int STEP, typename V, int... L> MZ_INLINE void exchange(V (&v)[NATIVE], std::integer_sequence<int, L...>) {
#pragma GCC unroll 16
  for (int i = 0; i < NATIVE; ++i)
    if (!(i & STEP)) {
      V low = MZ_SHUFFLE(v[i], v[i + STEP], (L & STEP ? L - STEP + NATIVE : L)...);
      v[i + STEP] = MZ_SHUFFLE(v[i], v[i + STEP], (L & STEP ? L + NATIVE : L + STEP)...);
      v[i] = low;
    }
}

template <typename V> MZ_INLINE void transpose(V (&v)[NATIVE]) {
  using Lanes = std::make_integer_sequence<int, NATIVE>;
  exchange<1>(v, Lanes{});
  exchange<2>(v, Lanes{});
  if constexpr (NATIVE > 4) exchange<4>(v, Lanes{});
  if constexpr (NATIVE > 8) exchange<8>(v, Lanes{});
}

}  // namespace mz
