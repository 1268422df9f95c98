// Sixteen float lanes, loads and stores of float, bfloat16 and half, and the few functions the kernels need of them.
//
// Written with the compiler's vector types, with intrinsics only where the compiler finds no single instruction by itself: the same
// source becomes one AVX-512 register, two of AVX2, or plain code, and a kernel is written once. Every function propagates NaN
// as its float64 specification does.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace mz {

constexpr int LANES = 16;

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

#define MZ_INLINE static inline __attribute__((always_inline))

MZ_INLINE F splat(float x) { return F{} + x; }
MZ_INLINE I as_int(F x) { I y; memcpy(&y, &x, sizeof y); return y; }
MZ_INLINE F as_float(I x) { F y; memcpy(&y, &x, sizeof y); return y; }
MZ_INLINE F as_float(U x) { F y; memcpy(&y, &x, sizeof y); return y; }
MZ_INLINE F maximum(F a, F b) { return (a > b) | (a != a) ? a : b; }  // NaN in either one stays
MZ_INLINE F minimum(F a, F b) { return a < b ? a : b; }
MZ_INLINE F magnitude(F x) { return as_float(as_int(x) & 0x7fffffff); }
MZ_INLINE F below_zero(F x) { return as_float(as_int(x) | (int32_t)0x80000000); }  // -|x|

// --- loads and stores: whole vectors, or the first n lanes (the others are 0) ------------------------------------------

MZ_INLINE F load(const float* p) { F x; memcpy(&x, p, sizeof x); return x; }
MZ_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }

#ifdef __AVX512F__
MZ_INLINE F load(const bf16* p) {
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
}
MZ_INLINE void narrowed(bf16* p, U x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)x)); }
#else
MZ_INLINE F load(const bf16* p) {
  H h; memcpy(&h, p, sizeof h);
  return as_float(__builtin_convertvector(h, U) << 16);
}
MZ_INLINE void narrowed(bf16* p, U x) {
  H h = __builtin_convertvector(x, H);
  memcpy(p, &h, sizeof h);
}
#endif

// Round to nearest, ties to even; a NaN keeps its sign and becomes quiet instead of being rounded into an infinity.
MZ_INLINE void store(bf16* p, F x) {
  U bits; memcpy(&bits, &x, sizeof bits);
  U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  U quiet = (bits >> 16) | 0x40u;
  narrowed(p, x == x ? rounded : quiet);
}

#ifdef __F16C__
MZ_INLINE F load(const fp16* p) {
  F x;
  for (int i = 0; i < LANES; i += 8) {
    __m256 part = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i)));
    memcpy(reinterpret_cast<float*>(&x) + i, &part, sizeof part);
  }
  return x;
}
MZ_INLINE void store(fp16* p, F x) {
  for (int i = 0; i < LANES; i += 8) {
    __m256 part; memcpy(&part, reinterpret_cast<float*>(&x) + i, sizeof part);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i), _mm256_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT));
  }
}
#else
// Without the instruction the compiler's own half type converts; it exists wherever SSE2 or NEON does.
MZ_INLINE F load(const fp16* p) {
  F x;
  for (int i = 0; i < LANES; ++i) { _Float16 h; memcpy(&h, p + i, 2); x[i] = (float)h; }
  return x;
}
MZ_INLINE void store(fp16* p, F x) {
  for (int i = 0; i < LANES; ++i) { _Float16 h = (_Float16)x[i]; memcpy(p + i, &h, 2); }
}
#endif

template <typename T> MZ_INLINE F load(const T* p, int64_t n) {
  if (n >= LANES) return load(p);
  T whole[LANES] = {};
  memcpy(whole, p, n * sizeof(T));
  return load(whole);
}
template <typename T> MZ_INLINE void store(T* p, F x, int64_t n) {
  if (n >= LANES) return store(p, x);
  T whole[LANES];
  store(whole, x);
  memcpy(p, whole, n * sizeof(T));
}

MZ_INLINE float get(const float* p) { return *p; }
template <typename T> MZ_INLINE float get(const T* p) { return load(p, 1)[0]; }
MZ_INLINE void put(float* p, float x) { *p = x; }
template <typename T> MZ_INLINE void put(T* p, float x) { store(p, splat(x), 1); }

// --- lanes ------------------------------------------------------------------------------------------------------------

MZ_INLINE I lane() { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
MZ_INLINE F first_lanes(F x, int64_t n, float other) { return lane() < (int32_t)(n < LANES ? n : LANES) ? x : splat(other); }

// A tree, so that the order of additions does not depend on the width of the machine's registers.
MZ_INLINE float sum(F x) {
  float v[LANES]; store(v, x);
  for (int step = LANES / 2; step; step /= 2)
    for (int i = 0; i < step; ++i) v[i] += v[i + step];
  return v[0];
}
MZ_INLINE float max(F x) {
  float v[LANES]; store(v, x);
  float m = v[0];
  for (int i = 1; i < LANES; ++i) m = (v[i] > m || v[i] != v[i]) ? v[i] : m;
  return m;
}

// --- functions ----------------------------------------------------------------------------------------------------------

// e^r for |r| <= ln 2 / 2: 1 + r + r^2 P(r), fitted here to a relative error of 4e-9.
MZ_INLINE F exp_near_zero(F r) {
  F p = splat(0.0013814577832818031f);
  p = p * r + 0.00836871936917305f;
  p = p * r + 0.04166838899254799f;
  p = p * r + 0.1666652113199234f;
  p = p * r + 0.4999999403953552f;
  return (p * r + 1.0f) * r + 1.0f;
}

// e^x to 1 ulp or so: x = n ln 2 + r, ln 2 in two parts, and 2^n so that subnormal results come out right. exp(-inf) = 0,
// exp(inf) = inf, NaN stays.
MZ_INLINE F exp(F x) {
#ifdef __AVX512F__
  // These instructions return their second operand where one is NaN.
  F c = (F)_mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x));
  F n = (F)_mm512_roundscale_ps((__m512)(c * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (F)_mm512_scalef_ps((__m512)exp_near_zero((c - n * 0.693359375f) - n * -2.12194440e-4f), (__m512)n);
#else
  F c = minimum(splat(89.0f), (x < -104.0f) ? splat(-104.0f) : x);
  F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F shifted = c * 1.44269504088896341f + magic;
  F n = shifted - magic;
  I k = as_int(shifted) - as_int(magic);
  I half = k >> 1;
  F low = as_float((half + 127) << 23), high = as_float((k - half + 127) << 23);
  F y = exp_near_zero((c - n * 0.693359375f) - n * -2.12194440e-4f) * low * high;
  return x == x ? y : x;
#endif
}

// 1 / x for x of moderate size (not 0, not infinite), to 1 ulp or so, without the slow division where that can be had.
MZ_INLINE F inverse(F x) {
#ifdef __AVX512F__
  F guess = (F)_mm512_rcp14_ps((__m512)x);
  return guess + guess * (1.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

// ln x for x > 0, to 1 ulp or so; ln 0 = -inf, ln inf = inf, NaN stays. Scalar: one per row is all that is needed.
MZ_INLINE float log(float x) { return std::log(x); }

// tanh through e^{-2|x|}; exact sign, +-1 at the ends.
MZ_INLINE F tanh(F x) {
  F magnitude = as_float(as_int(x) & 0x7fffffff);
  F e = exp(magnitude * -2.0f);
  F y = (1.0f - e) / (1.0f + e);
  F square = x * x;  // near 0 the quotient loses its digits: odd polynomial there
  F small = x * (1.0f + square * (-0.333333333f + square * (0.133333333f + square * -0.0539682540f)));
  F whole = as_float(as_int(y) | (as_int(x) & (int32_t)0x80000000));
  return magnitude < 0.15f ? small : (x == x ? whole : x);
}

// e = e^{-|x|} <= 1 keeps both sigmoid(x) and 1 - sigmoid(x) quotients of moderate numbers: near = 1 / (1 + e) and e * near.
MZ_INLINE F sigmoid(F x) {
  F e = exp(below_zero(x)), near = inverse(1.0f + e);
  return x < 0.0f ? e * near : near;
}

}  // namespace mz
