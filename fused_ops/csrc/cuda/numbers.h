// Storage types, and packs of elements that a thread reads and writes at once. All computations are in float.
#pragma once

#include <cmath>

#include "platform.h"

namespace mz {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// Elements of 16 bytes, the widest access of a thread.
template <typename T> constexpr int WIDEST = 16 / sizeof(T);

template <int W> struct Floats {
  float at[W];
  MZ_DEVICE float& operator[](int i) { return at[i]; }
  MZ_DEVICE float operator[](int i) const { return at[i]; }
};

template <int W> MZ_DEVICE Floats<W> all_of(float x) {
  Floats<W> result;
#pragma unroll
  for (int j = 0; j < W; ++j) result[j] = x;
  return result;
}

// f(x...) element by element.
template <int W, typename Function, typename... Rest> MZ_DEVICE Floats<W> map(const Function& f, const Floats<W>& x, const Rest&... rest) {
  Floats<W> result;
#pragma unroll
  for (int j = 0; j < W; ++j) result[j] = f(x[j], rest[j]...);
  return result;
}

template <int W> MZ_DEVICE Floats<W> operator+(const Floats<W>& x, const Floats<W>& y) {
  return map([](float a, float b) { return a + b; }, x, y);
}

MZ_DEVICE float widened(float x) { return x; }
MZ_DEVICE float widened(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
#ifdef __CUDACC__
MZ_DEVICE float widened(fp16 x) { return __half2float(__ushort_as_half(x.bits)); }
#else
MZ_DEVICE float widened(fp16 x) { _Float16 half; memcpy(&half, &x, 2); return (float)half; }
#endif

// Rounded to nearest, ties to even.
MZ_DEVICE void narrow(float& to, float x) { to = x; }
#ifdef __CUDACC__
MZ_DEVICE void narrow(bf16& to, float x) { to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
MZ_DEVICE void narrow(fp16& to, float x) { to.bits = __half_as_ushort(__float2half_rn(x)); }
#else
MZ_DEVICE void narrow(bf16& to, float x) {
  unsigned bits = __float_as_uint(x);
  to.bits = x != x ? 0x7FFF : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
MZ_DEVICE void narrow(fp16& to, float x) { _Float16 half = (_Float16)x; memcpy(&to, &half, 2); }
#endif

// 2^x to 2 ulp, 0 below the smallest normal number; and 1 / x to 1 ulp, x and its inverse normal numbers.
#ifdef __CUDACC__
MZ_DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MZ_DEVICE float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
MZ_DEVICE float power_of_two(float x) { return exp2f(x); }
MZ_DEVICE float inverse(float x) { return 1.0f / x; }
#endif

// x rounded to the storage type T.
template <typename T> MZ_DEVICE float rounded(float x) {
  T stored;
  narrow(stored, x);
  return widened(stored);
}

// Two neighbours in a word of 32 bits, the first in its lower half.
MZ_DEVICE void unpack(unsigned word, float& first, float& second, bf16) {
  first = __uint_as_float(word << 16), second = __uint_as_float(word & 0xFFFF0000u);
}
#ifdef __CUDACC__
MZ_DEVICE void unpack(unsigned word, float& first, float& second, fp16) {
  float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word));
  first = both.x, second = both.y;
}
MZ_DEVICE unsigned pack(float first, float second, bf16) {
  __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<unsigned*>(&both);
}
MZ_DEVICE unsigned pack(float first, float second, fp16) {
  __half2 both = __floats2half2_rn(first, second);
  return *reinterpret_cast<unsigned*>(&both);
}
#else
MZ_DEVICE void unpack(unsigned word, float& first, float& second, fp16) {
  first = widened(fp16{(uint16_t)word}), second = widened(fp16{(uint16_t)(word >> 16)});
}
template <typename T> MZ_DEVICE unsigned pack(float first, float second, T) {
  T low, high;
  narrow(low, first), narrow(high, second);
  return low.bits | (unsigned)high.bits << 16;
}
#endif

// Moves COUNT words in one access, in program order. It is written explicitly, since the compiler may split wide
// accesses.
template <int COUNT> struct Access;
#ifdef __CUDACC__
template <> struct Access<1> {
  static MZ_DEVICE void load(const void* p, unsigned* to) { asm volatile("ld.global.u32 %0, [%1];" : "=r"(to[0]) : "l"(p)); }
  static MZ_DEVICE void store(void* p, const unsigned* x) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(x[0])); }
};
template <> struct Access<2> {
  static MZ_DEVICE void load(const void* p, unsigned* to) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(p));
  }
  static MZ_DEVICE void store(void* p, const unsigned* x) { asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x[0]), "r"(x[1])); }
};
template <> struct Access<4> {
  static MZ_DEVICE void load(const void* p, unsigned* to) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(p));
  }
  static MZ_DEVICE void store(void* p, const unsigned* x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
  }
};
#else
template <int COUNT> struct Access {
  static MZ_DEVICE void load(const void* p, unsigned* to) { memcpy(to, p, 4 * COUNT); }
  static MZ_DEVICE void store(void* p, const unsigned* x) { memcpy(p, x, 4 * COUNT); }
};
#endif

// A pack of W neighbours: WORDS words, moved in accesses of up to 16 bytes. (One of 16 bits alone is no pack.)
template <typename T, int W> struct Pack {
  static constexpr int WORDS = larger<int>(1, W * sizeof(T) / 4), COUNT = smaller(4, WORDS), ALIGNMENT = smaller<int>(16, W * sizeof(T));
  typedef Access<COUNT> In;
};

// W neighbours as they are stored. A load may still be on its way where only these are used.
template <typename T, int W> struct Words { unsigned at[Pack<T, W>::WORDS]; };

template <int W, typename T> MZ_DEVICE Words<T, W> fetch(const T* from) {
  MZ_ALIGNED(from, (Pack<T, W>::ALIGNMENT));
  Words<T, W> words;
  if constexpr (W * sizeof(T) < 4) {
    words.at[0] = from->bits;
  } else {
    typedef Pack<T, W> P;
#pragma unroll
    for (int k = 0; k < P::WORDS / P::COUNT; ++k) P::In::load(reinterpret_cast<const char*>(from) + 4 * P::COUNT * k, words.at + P::COUNT * k);
  }
  return words;
}

template <typename T, int W> MZ_DEVICE Floats<W> widened(const Words<T, W>& words) {
  Floats<W> result;
  if constexpr (W * sizeof(T) < 4) {
    result[0] = widened(T{(uint16_t)words.at[0]});
  } else {
#pragma unroll
    for (int k = 0; k < Pack<T, W>::WORDS; ++k) {
      if constexpr (sizeof(T) == 4) result[k] = __uint_as_float(words.at[k]);
      else unpack(words.at[k], result[2 * k], result[2 * k + 1], T());
    }
  }
  return result;
}

template <int W, typename T> MZ_DEVICE Floats<W> load(const T* from) { return widened(fetch<W>(from)); }

template <int W, typename T> MZ_DEVICE void store(T* to, const Floats<W>& x) {
  MZ_ALIGNED(to, (Pack<T, W>::ALIGNMENT));
  if constexpr (W * sizeof(T) < 4) {
    narrow(*to, x[0]);
  } else {
    typedef Pack<T, W> P;
    unsigned words[P::WORDS];
#pragma unroll
    for (int k = 0; k < P::WORDS; ++k) {
      if constexpr (sizeof(T) == 4) words[k] = __float_as_uint(x[k]);
      else words[k] = pack(x[2 * k], x[2 * k + 1], T());
    }
#pragma unroll
    for (int k = 0; k < P::WORDS / P::COUNT; ++k) P::In::store(reinterpret_cast<char*>(to) + 4 * P::COUNT * k, words + P::COUNT * k);
  }
}

// Whether packs of W can be read at these places; absent ones are null.
template <int W, typename T> bool aligned(const T* pointer) { return reinterpret_cast<uintptr_t>(pointer) % Pack<T, W>::ALIGNMENT == 0; }
template <int W, typename T, typename... Rest> bool aligned(const T* pointer, const Rest*... rest) {
  return aligned<W>(pointer) && aligned<W>(rest...);
}

}  // namespace mz
