// Division by a number that the host knows.
#pragma once

#include "platform.h"

namespace mz {

// n / by, for n from 0. Below 2^31 it is a multiplication: with 2^shift the first power of two that is not below `by`, and
// factor = 2^32 (2^shift - by) / by + 1, rounded down, it is (n factor / 2^32 + n) / 2^shift.
struct Divisor {
  static constexpr int64_t SMALL = (int64_t)1 << 31;
  int64_t by;
  uint32_t factor = 0;
  int shift = 0;

  Divisor(int64_t by) : by(by) {
    if (by <= 0 || by >= SMALL) return;  // 0 where there is nothing to divide
    while ((int64_t)1 << shift < by) ++shift;
    factor = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << shift) - by)) / by + 1);
  }
  MZ_DEVICE int64_t operator()(int64_t n) const {
    if (n >= SMALL || by >= SMALL) return n / by;
    return (((uint32_t)n * (uint64_t)factor >> 32) + (uint32_t)n) >> shift;
  }
};

}  // namespace mz
