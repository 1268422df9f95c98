// A 64-bit hash of a block of bytes, also computed while the block is copied. `megazero/disk/checksum.py` has its definition.
#pragma once

#include <cstring>

#include "kernel.h"

namespace mz {

constexpr int64_t HASH_BLOCK = 1 << 16;  // bytes of a block
constexpr int64_t HASH_LANES = 512;      // 64-bit words of a stripe
constexpr int64_t HASH_LINE = 8;         // 64-bit words of a line of the cache

constexpr uint64_t HASH_FACTOR = 0x9E3779B97F4A7C15;
constexpr uint64_t HASH_STEP = 0xD6E8FEB86659FD93;

// Every step is a bijection of its 64 bits, so two states that differ in one word stay different.
MZ_INLINE uint64_t mixed(uint64_t x) {
  x *= HASH_FACTOR;
  return x ^ (x >> 29);
}

// Takes a stripe of 4096 bytes into the lanes, and copies it to `to` if COPY. Any alignment.
//
// It is not inlined: where GCC sees the loop over stripes, it takes two of them at once, a line of each in turns. Then
// the processor no longer fetches the next lines ahead, and the rate from memory is half of what it can be.
template <bool COPY>
__attribute__((noinline)) void take_stripe(uint64_t* __restrict lanes, uint8_t* __restrict to, const uint8_t* __restrict from) {
  // By lines of the cache: of a single loop with a copy GCC makes a call of memcpy and a second pass over the stripe.
  for (int64_t line = 0; line < HASH_LANES; line += HASH_LINE)
    for (int64_t i = line; i < line + HASH_LINE; ++i) {
      uint64_t word;
      memcpy(&word, from + 8 * i, 8);
      if (COPY) memcpy(to + 8 * i, &word, 8);
      lanes[i] = mixed(lanes[i] ^ word);
    }
}

// Hash of up to HASH_BLOCK bytes, of which `to` becomes a copy if COPY.
template <bool COPY> inline uint64_t block_hash(uint8_t* __restrict to, const uint8_t* __restrict from, int64_t bytes) {
  constexpr int64_t STRIPE = 8 * HASH_LANES;
  alignas(64) uint64_t lanes[HASH_LANES];
  for (int64_t i = 0; i < HASH_LANES; ++i) lanes[i] = (uint64_t)(i + 1) * HASH_STEP;
  int64_t whole = bytes / STRIPE * STRIPE;
  for (int64_t at = 0; at < whole; at += STRIPE) take_stripe<COPY>(lanes, to + at, from + at);
  if (whole < bytes) {
    alignas(64) uint8_t last[STRIPE] = {};
    memcpy(last, from + whole, bytes - whole);
    if (COPY) memcpy(to + whole, last, bytes - whole);
    take_stripe<false>(lanes, nullptr, last);
  }
  for (int64_t half = HASH_LANES / 2; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) {
      uint64_t other = lanes[i + half];
      lanes[i] = mixed(lanes[i] ^ (other << 31 | other >> 33));
    }
  return mixed(lanes[0] ^ (uint64_t)bytes);
}

// The sum of the blocks' hashes. Copies the bytes unless `to` is null. `first`: number of the first block in its piece.
inline uint64_t checksum(uint8_t* to, const uint8_t* from, int64_t bytes, int64_t first) {
  uint64_t sum = 0;
  for (int64_t at = 0; at < bytes; at += HASH_BLOCK) {
    uint64_t number = (uint64_t)(first + at / HASH_BLOCK + 1);
    int64_t count = std::min(HASH_BLOCK, bytes - at);
    uint64_t hash = to ? block_hash<true>(to + at, from + at, count) : block_hash<false>(nullptr, from + at, count);
    sum += mixed(mixed(hash ^ number * HASH_STEP));
  }
  return sum;
}

}  // namespace mz
