// Blocks of int8 or int4 codes with one scale each, and sums of them. The layout of a row is that of fused_ops/quantise.py.
#include "rows.h"

using namespace mz;

namespace {

constexpr int64_t BLOCK = 256, VECTORS = BLOCK / LANES, ALIGNMENT = 16;
constexpr float SMALLEST = std::numeric_limits<float>::min(), LARGEST = std::numeric_limits<float>::max();
constexpr int32_t INFINITE = 0x7f800000;

constexpr int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// A packed row of n elements.
template <int BITS> struct Row {
  static constexpr float LARGEST_CODE = BITS == 8 ? 127.0f : 7.0f;
  int64_t n;
  int64_t blocks() const { return (n + BLOCK - 1) / BLOCK; }
  int64_t codes() const { return aligned((n * BITS + 7) / 8); }
  int64_t scales() const { return aligned(4 * blocks()); }
  int64_t bytes() const { return codes() + scales(); }
  int64_t elements(int64_t block) const { return std::min(BLOCK, n - block * BLOCK); }
};

// Calls body(n), with a constant for a whole block, so that its loops are unrolled.
template <typename Body> MZ_INLINE void each_length(int64_t n, const Body& body) {
  if (n == BLOCK) body(std::integral_constant<int64_t, BLOCK>());
  else body(n);
}

MZ_INLINE I nearest(F x) {
  float values[LANES];
  store(values, x);
  for (int i = 0; i < LANES; ++i) values[i] = __builtin_rintf(values[i]);
  return to_int(load(values));
}

MZ_INLINE void store_bytes(uint8_t* to, I x) {
  int32_t codes[LANES];
  memcpy(codes, &x, sizeof codes);
  for (int i = 0; i < LANES; ++i) to[i] = (uint8_t)codes[i];
}

// What quantisation loses of the block goes to `error` where that is not null. Codes end with their last 16 bytes.
template <int BITS, typename T> MZ_INLINE void quantise_block(const T* x, float* error, int64_t n, uint8_t* codes, float* scale_out) {
  F values[VECTORS];
  I most{};
  for (int64_t k = 0; k < VECTORS; ++k) {
    int64_t lanes = n - k * LANES;
    values[k] = lanes > 0 ? load(x + k * LANES, lanes) : F{};
    if (error && lanes > 0) values[k] += load(error + k * LANES, lanes);
    I bits = as_int(magnitude(values[k]));  // the order of numbers, with NaN above infinity
    most = choose(bits > most, bits, most);
  }
  int32_t largest = 0;
  for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]);
  bool finite = largest < INFINITE;
  float size;
  memcpy(&size, &largest, 4);
  // Below `top` no product with a code overflows.
  const float top = std::nextafter(LARGEST / Row<BITS>::LARGEST_CODE, 0.0f);
  float scale = std::min(std::max(size / Row<BITS>::LARGEST_CODE, SMALLEST), top), inverse = finite ? 1.0f / scale : 0.0f;
  *scale_out = finite ? scale : std::numeric_limits<float>::quiet_NaN();
  for (int64_t k = 0; k < VECTORS && k * LANES < n; k += BITS == 8 ? 1 : 2) {
    I code[2];
    for (int64_t half = 0; half < (BITS == 8 ? 1 : 2); ++half) {
      int64_t at = k + half, lanes = n - at * LANES;
      code[half] = finite ? nearest(values[at] * inverse) : I{};
      if (error && finite && lanes > 0)
        store(error + at * LANES, values[at] - to_float(code[half]) * scale, lanes);
    }
    if (BITS == 8) store_bytes(codes + k * LANES, code[0]);
    else store_bytes(codes + k * LANES / 2, (code[0] + 8) | ((code[1] + 8) << 4));
  }
}

template <int BITS, typename T> void quantise(int64_t threads, int64_t rows, int64_t n, const T* x, float* error, uint8_t* packed) {
  Row<BITS> of{n};
  int64_t blocks = of.blocks();
  parallel_for(rows * blocks, 32, (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      int64_t row = at / blocks, block = at % blocks, first = row * n + block * BLOCK;
      uint8_t *codes = packed + row * of.bytes(), *scales = codes + of.codes();
      float scale;
      each_length(of.elements(block), [&](auto n) MZ_LAMBDA {
        quantise_block<BITS>(x + first, error ? error + first : nullptr, n, codes + block * BLOCK * BITS / 8, &scale);
      });
      memcpy(scales + 4 * block, &scale, 4);
      if (block == blocks - 1) memset(scales + 4 * blocks, 0, of.scales() - 4 * blocks);
    }
  });
}

template <int BITS> MZ_INLINE F sixteen(const uint8_t* codes, int64_t vector) {
  if (BITS == 8) {
    float values[LANES];
    for (int i = 0; i < LANES; ++i) values[i] = (float)(int8_t)codes[vector * LANES + i];
    return load(values);
  }
  const uint8_t* pairs = codes + vector / 2 * LANES;  // of this vector and the one before or behind
  float values[LANES];
  for (int i = 0; i < LANES; ++i) values[i] = (float)((vector % 2 ? pairs[i] >> 4 : pairs[i] & 15) - 8);
  return load(values);
}

// The sum of a block of n elements over `parts` packed rows. It is rounded as on every other level: ranks on other
// processors get the same bits.
template <int BITS, typename T>
MZ_INLINE void add_block(const Row<BITS>& of, int64_t block, int64_t n, int64_t parts, const uint8_t* packed, T* out) {
  F sums[VECTORS] = {};
  int64_t vectors = (n + LANES - 1) / LANES;
  for (int64_t part = 0; part < parts; ++part) {
    const uint8_t *row = packed + part * of.bytes(), *codes = row + block * BLOCK * BITS / 8;
    float scale;
    memcpy(&scale, row + of.codes() + 4 * block, 4);
    for (int64_t k = 0; k < vectors; ++k) sums[k] += sixteen<BITS>(codes, k) * scale;
  }
  int64_t whole = n / LANES;
  for (int64_t k = 0; k < whole; ++k) store_exact(out + k * LANES, sums[k]);
  if (n % LANES) store_exact(out + whole * LANES, sums[whole], n % LANES);
}

template <int BITS, typename T> void dequantise(int64_t threads, int64_t rows, int64_t parts, int64_t n, const uint8_t* packed, T* out) {
  Row<BITS> of{n};
  int64_t blocks = of.blocks();
  parallel_for(rows * blocks, 32, (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      int64_t row = at / blocks, block = at % blocks;
      each_length(of.elements(block), [&](auto length) MZ_LAMBDA {
        add_block(of, block, length, parts, packed + row * parts * of.bytes(), out + row * n + block * BLOCK);
      });
    }
  });
}

}  // namespace

#define MZ_BLOCKS(BITS, SUFFIX, T)                                                                                           \
  MZ_API void quantise_int##BITS##_##SUFFIX(int64_t threads, int64_t rows, int64_t n, const T* x, float* error,              \
                                            uint8_t* packed) {                                                               \
    quantise<BITS>(threads, rows, n, x, error, packed);                                                                      \
  }                                                                                                                          \
  MZ_API void dequantise_int##BITS##_##SUFFIX(int64_t threads, int64_t rows, int64_t parts, int64_t n,                       \
                                              const uint8_t* packed, T* out) {                                               \
    dequantise<BITS>(threads, rows, parts, n, packed, out);                                                                  \
  }
#define MZ_KERNEL(SUFFIX, T) MZ_BLOCKS(8, SUFFIX, T) MZ_BLOCKS(4, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
