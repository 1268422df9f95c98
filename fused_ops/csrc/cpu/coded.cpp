// Numbers of codes, times the scale of their block. fused_ops/coded.py has the layout.
#include "rows.h"

using namespace mz;

namespace {

constexpr int64_t GROUP = 256;

template <int BITS> constexpr int64_t BLOCK = BITS == 4 ? 64 : 256;

// a b + c, with the product rounded: a fused product would have other bits than other machines.
MZ_INLINE float rounded_twice(float a, float b, float c) {
  volatile float product = a * b;
  return product + c;
}

// The numbers of 16 codes of 4 bits: of them the first is in the upper half of the first of 8 bytes.
MZ_INLINE F looked_up(const uint8_t* bytes, F numbers) {
#ifdef __AVX512F__
  __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  __m512i words = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(pairs, pairs));
  const __m512i halves = _mm512_set_epi32(0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4);
  return (F)_mm512_permutexvar_ps(_mm512_srlv_epi32(words, halves), (__m512)numbers);  // it looks at the lowest 4 bits
#else
  float table[LANES], x[LANES];
  store(table, numbers);
  for (int i = 0; i < LANES / 2; ++i) x[2 * i] = table[bytes[i] >> 4], x[2 * i + 1] = table[bytes[i] & 15];
  return load(x);
#endif
}

// Elements [start, stop) of a run, all of one block. A run whose block begins within a byte is read one by one.
template <typename T>
MZ_INLINE void decode_4(const uint8_t* codes, int64_t start, int64_t stop, const float* table, float scale, T* out) {
  F numbers = load(table) * scale;
  if (start % 2) {
    for (int64_t i = start; i < stop; ++i) {
      F x = splat(numbers[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4]);
      store_exact(out + i, x, 1);
    }
    return;
  }
  for (int64_t i = start; i < stop; i += LANES) {
    int64_t lanes = std::min<int64_t>(LANES, stop - i);
    if (lanes == LANES) {
      store_exact(out + i, looked_up(codes + i / 2, numbers));
    } else {
      uint8_t last[LANES / 2] = {};
      memcpy(last, codes + i / 2, (lanes + 1) / 2);
      store_exact(out + i, looked_up(last, numbers), lanes);
    }
  }
}

template <typename T>
MZ_INLINE void decode_8(const uint8_t* codes, int64_t start, int64_t stop, const float* table, float scale, T* out) {
  for (int64_t i = start; i < stop; i += LANES) {
    int64_t lanes = std::min<int64_t>(LANES, stop - i);
    float x[LANES] = {};
    for (int64_t j = 0; j < lanes; ++j) x[j] = table[codes[i + j]];
    if (lanes == LANES) store_exact(out + i, load(x) * scale);
    else store_exact(out + i, load(x) * scale, lanes);
  }
}

// As `CodedBox` of fused_ops/coded.py. group: the first group of scales. out_stride: from a run of `out` to the next.
struct Box { int64_t runs, length, first, stride, blocks, group, out_stride; };

// A code's number, and for 4 bits what the code of a scale says.
struct Tables { const float *numbers, *scales; };

template <int BITS, typename Scale, typename T>
void decode(int threads, const Box& box, const Tables& tables, const uint8_t* codes, const Scale* scales, const float* nested, T* out) {
  int64_t run_bytes = (box.length * BITS + 7) / 8;
  parallel_for(box.runs * box.blocks, 8192 / BLOCK<BITS>, threads, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      int64_t run = at / box.blocks, block = at % box.blocks, place = box.first + run * box.stride, phase = place % BLOCK<BITS>;
      int64_t start = std::max<int64_t>(0, block * BLOCK<BITS> - phase);
      int64_t stop = std::min(box.length, (block + 1) * BLOCK<BITS> - phase);
      if (start >= stop) continue;
      const uint8_t* own = codes + run * run_bytes;
      T* to = out + run * box.out_stride;
      if constexpr (BITS == 4) {
        int64_t number = place / BLOCK<BITS> + block;
        float scale = rounded_twice(tables.scales[scales[at]], nested[1 + number / GROUP - box.group], nested[0]);
        decode_4(own, start, stop, tables.numbers, scale, to);
      } else {
        decode_8(own, start, stop, tables.numbers, scales[at], to);
      }
    }
  });
}

}  // namespace

#define MZ_CODED(BITS, SCALE, SUFFIX, T)                                                                                     \
  MZ_API void decode_##BITS##_bits_##SUFFIX(int64_t threads, int64_t runs, int64_t length, int64_t first, int64_t stride,    \
                                            int64_t blocks, int64_t group, int64_t out_stride, const float* numbers,         \
                                            const float* of_scales, const uint8_t* codes, const SCALE* scales,               \
                                            const float* nested, T* out) {                                                   \
    Box box{runs, length, first, stride, blocks, group, out_stride};                                                         \
    decode<BITS>((int)threads, box, Tables{numbers, of_scales}, codes, scales, nested, out);                                 \
  }
#define MZ_KERNEL(SUFFIX, T) MZ_CODED(4, uint8_t, SUFFIX, T) MZ_CODED(8, float, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
