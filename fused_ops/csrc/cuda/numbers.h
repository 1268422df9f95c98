// Storage types, and packs of them: what a thread reads and writes at once. Everything is computed in float.
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

// What x is once it is stored.
template <typename T> MZ_DEVICE float rounded(float x) {
  T stored;
  narrow(stored, x);
  return widened(stored);
}

// W neighbours in memory, aligned to the access that moves them.
template <typename T, int W> struct alignas(smaller<int>(16, W * sizeof(T))) Pack { T at[W]; };

template <int W, typename T> MZ_DEVICE Floats<W> load(const T* from) {
  typedef Pack<T, W> P;
  MZ_ALIGNED(from, P);
  P pack = *reinterpret_cast<const P*>(from);
  Floats<W> result;
#pragma unroll
  for (int j = 0; j < W; ++j) result[j] = widened(pack.at[j]);
  return result;
}

template <int W, typename T> MZ_DEVICE void store(T* to, const Floats<W>& x) {
  typedef Pack<T, W> P;
  MZ_ALIGNED(to, P);
  P pack;
#pragma unroll
  for (int j = 0; j < W; ++j) narrow(pack.at[j], x[j]);
  *reinterpret_cast<P*>(to) = pack;
}

// Whether packs of W can be read at these places; absent ones are null.
template <int W, typename T> bool aligned(const T* pointer) { return reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<T, W>) == 0; }
template <int W, typename T, typename... Rest> bool aligned(const T* pointer, const Rest*... rest) {
  return aligned<W>(pointer) && aligned<W>(rest...);
}

}  // namespace mz
