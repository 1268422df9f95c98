// Numbers of codes, times the scale of their block. fused_ops/coded.py has the layout.
#include "elements.h"

using namespace mz;

namespace {

constexpr int64_t GROUP = 256;

// a b + c, with the product rounded: a fused product would have other bits than other machines.
MZ_DEVICE float rounded_twice(float a, float b, float c) {
#ifdef __CUDACC__
  return __fadd_rn(__fmul_rn(a, b), c);
#else
  volatile float product = a * b;
  return product + c;
#endif
}

// The scale of a block, by its number in the whole matrix and among those that the box has.
struct Nested {
  const float* table;
  const uint8_t* scales;
  const float* nested;
  int64_t group;
  MZ_DEVICE float operator()(int64_t number, int64_t at) const {
    return rounded_twice(table[scales[at]], nested[1 + number / GROUP - group], nested[0]);
  }
};
struct Plain {
  const float* scales;
  MZ_DEVICE float operator()(int64_t, int64_t at) const { return scales[at]; }
};

// As `CodedBox` of fused_ops/coded.py. out_stride: from a run of `out` to the next.
struct Box { int64_t runs, length, first, stride, blocks, out_stride; };

// W elements of a run. W > 1: all of them are of one block.
template <int BITS, typename Scale, typename T, int W_> struct Decode {
  static constexpr int W = W_, BLOCK = BITS == 4 ? 64 : 256;
  Box box;
  const float* numbers;
  const uint8_t* codes;
  Scale scale;
  T* out;

  MZ_DEVICE void operator()(int64_t run, int64_t column) const {
    int64_t place = box.first + run * box.stride, block = (place % BLOCK + column) / BLOCK;
    float of_block = scale(place / BLOCK + block, run * box.blocks + block);
    const uint8_t* own = codes + run * ((box.length * BITS + 7) / 8) + column * BITS / 8;
    Floats<W> x;
    if constexpr (W == 1) {
      unsigned code = BITS == 8 ? *own : column % 2 ? *own & 15u : *own >> 4;
      x[0] = numbers[code] * of_block;
    } else {
      constexpr int WORDS = W * BITS / 32;
      unsigned words[WORDS];
      Access<WORDS>::load(own, words);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        // Of two codes of 4 bits the first is in the upper half of their byte.
        unsigned code = BITS == 8 ? words[j / 4] >> j % 4 * 8 & 255u : words[0] >> (j / 2 * 8 + (j % 2 ? 0 : 4)) & 15u;
        x[j] = numbers[code] * of_block;
      }
    }
    store<W>(out + run * box.out_stride + column, x);
  }
};

template <int BITS, typename Scale, typename T>
int decode(const Launch& to, const Box& box, const float* numbers, const uint8_t* codes, const Scale& scale, T* out) {
  constexpr int W = 8;
  bool together = box.length % W == 0 && box.first % W == 0 && box.stride % W == 0;
  if (together && box.out_stride % W == 0 && aligned<W>(out))
    return each_element(to, Decode<BITS, Scale, T, W>{box, numbers, codes, scale, out}, box.runs, box.length);
  return each_element(to, Decode<BITS, Scale, T, 1>{box, numbers, codes, scale, out}, box.runs, box.length);
}

}  // namespace

// codes: begins at a multiple of 16 bytes.
#define MZ_KERNEL(SUFFIX, T)                                                                                                     \
  MZ_API int decode_4_bits_##SUFFIX(Launch* to, int64_t runs, int64_t length, int64_t first, int64_t stride, int64_t blocks,     \
                                    int64_t group, int64_t out_stride, const float* numbers, const float* of_scales,             \
                                    const uint8_t* codes, const uint8_t* scales, const float* nested, T* out) {                  \
    Box box{runs, length, first, stride, blocks, out_stride};                                                                    \
    return decode<4>(*to, box, numbers, codes, Nested{of_scales, scales, nested, group}, out);                                   \
  }                                                                                                                              \
  MZ_API int decode_8_bits_##SUFFIX(Launch* to, int64_t runs, int64_t length, int64_t first, int64_t stride, int64_t blocks,     \
                                    int64_t, int64_t out_stride, const float* numbers, const float*, const uint8_t* codes,       \
                                    const float* scales, const float*, T* out) {                                                 \
    Box box{runs, length, first, stride, blocks, out_stride};                                                                    \
    return decode<8>(*to, box, numbers, codes, Plain{scales}, out);                                                              \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
