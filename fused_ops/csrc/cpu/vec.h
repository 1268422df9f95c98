// Sixteen float lanes, loads and stores of float, bfloat16 and half, and sums over lanes.
//
// It uses the compiler's vector types, and intrinsics only where the compiler does not find a single instruction
// itself. So a kernel is written once: the same source compiles to one AVX-512 register, two of AVX2, or plain code.
// Every function propagates NaN as its float64 specification does.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __AVX__
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

// Significant bits of a storage type. Results that are stored in T are computed to a few bits more than these.
template <typename T> constexpr int DIGITS = 24;
template <> constexpr int DIGITS<bf16> = 8;
template <> constexpr int DIGITS<fp16> = 11;

#define MZ_INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define MZ_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MZ_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, U{__VA_ARGS__})
#endif

MZ_INLINE F splat(float x) { return F{} + x; }
MZ_INLINE I as_int(F x) { I y; memcpy(&y, &x, sizeof y); return y; }
MZ_INLINE F as_float(I x) { F y; memcpy(&y, &x, sizeof y); return y; }
MZ_INLINE F as_float(U x) { F y; memcpy(&y, &x, sizeof y); return y; }
MZ_INLINE F maximum(F a, F b) { return (a > b) | (a != a) ? a : b; }  // NaN in either one stays
// The larger one; `best` where x is NaN.
#ifdef __AVX512F__
MZ_INLINE F larger(F best, F x) { return (F)_mm512_max_ps((__m512)x, (__m512)best); }
#else
MZ_INLINE F larger(F best, F x) { return x > best ? x : best; }
#endif

#ifdef __AVX512F__  // these instructions return their second operand where one is NaN
MZ_INLINE F at_most(F x, float top) { return (F)_mm512_min_ps(_mm512_set1_ps(top), (__m512)x); }
MZ_INLINE F at_least(F x, float bottom) { return (F)_mm512_max_ps(_mm512_set1_ps(bottom), (__m512)x); }
#else
MZ_INLINE F at_most(F x, float top) { return x > top ? splat(top) : x; }
MZ_INLINE F at_least(F x, float bottom) { return x < bottom ? splat(bottom) : x; }
#endif
MZ_INLINE F plus(F a, F b) { return a + b; }
MZ_INLINE F magnitude(F x) { return as_float(as_int(x) & 0x7fffffff); }
MZ_INLINE F below_zero(F x) { return as_float(as_int(x) | (int32_t)0x80000000); }  // -|x|

// --- loads and stores: whole vectors, or the first n lanes (the others are 0) ---------------------------------------

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
MZ_INLINE U rounded(F x) {
  U bits; memcpy(&bits, &x, sizeof bits);
  U quiet = bits | 0x400000u, even = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x == x ? even : quiet;  // in the upper half
}
MZ_INLINE void store_exact(bf16* p, F x) { narrowed(p, rounded(x) >> 16); }

// The processor's own conversion does the same, but flushes numbers below the smallest normal one (1.2e-38) to 0.
#ifdef __AVX512BF16__
MZ_INLINE void store(bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#else
MZ_INLINE void store(bf16* p, F x) { store_exact(p, x); }
#endif

#if defined(__AVX512F__)
MZ_INLINE F load(const fp16* p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
MZ_INLINE void store(fp16* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
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

template <typename T> MZ_INLINE void store_exact(T* p, F x) { store(p, x); }
template <typename T> MZ_INLINE void store_exact(T* p, F x, int64_t n) {
  T whole[LANES];
  store_exact(whole, x);
  memcpy((void*)p, whole, n * sizeof(T));
}

MZ_INLINE float get(const float* p) { return *p; }
template <typename T> MZ_INLINE float get(const T* p) { return load(p, 1)[0]; }
MZ_INLINE void put(float* p, float x) { *p = x; }
template <typename T> MZ_INLINE void put(T* p, float x) { store(p, splat(x), 1); }

// As `store`, but rounded as on every other level, and past the caches: a line that is written as a whole is not
// fetched first. It is for results that are not read soon. p is aligned to 16 elements. `streamed` makes the writes
// visible to other threads.
template <typename T> MZ_INLINE void stream(T* p, F x) {
  alignas(64) T whole[LANES];
  store_exact(whole, x);
#ifdef __AVX__
  if constexpr (sizeof(T) == 2) return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), *reinterpret_cast<const __m256i*>(whole));
#endif
  memcpy((void*)p, whole, sizeof whole);
}
MZ_INLINE void streamed() {
#ifdef __AVX__
  _mm_sfence();
#endif
}

// --- two vectors at once --------------------------------------------------------------------------------------------

// 2 LANES neighbours, in the order that costs least: of bf16 `first` holds those at even places, which are the lower
// halves of 32-bit words, and `second` the others. Other types keep their order.
struct Two { F first, second; };
MZ_INLINE Two operator+(Two a, Two b) { return {a.first + b.first, a.second + b.second}; }
MZ_INLINE Two operator-(Two a, Two b) { return {a.first - b.first, a.second - b.second}; }
MZ_INLINE Two operator*(Two a, Two b) { return {a.first * b.first, a.second * b.second}; }
MZ_INLINE Two operator-(Two a, float b) { return {a.first - b, a.second - b}; }
MZ_INLINE Two operator*(Two a, float b) { return {a.first * b, a.second * b}; }

template <typename T> MZ_INLINE Two load_two(const T* p) { return {load(p), load(p + LANES)}; }
template <typename T> MZ_INLINE void store_two(T* p, Two x) { store(p, x.first), store(p + LANES, x.second); }

MZ_INLINE Two load_two(const bf16* p) {
  U words; memcpy(&words, p, sizeof words);
  return {as_float(words << 16), as_float(words & 0xffff0000u)};
}
MZ_INLINE void store_two(bf16* p, Two x) {
#ifdef __AVX512BF16__
  const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                          19, 3, 18, 2, 17, 1, 16, 0);
  __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)x.second, (__m512)x.first);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(places, halves));
#else
  U words = (rounded(x.first) >> 16) | (rounded(x.second) & 0xffff0000u);
  memcpy((void*)p, &words, sizeof words);
#endif
}

// The same values in the order of memory.
template <typename T> MZ_INLINE Two in_order(Two x) {
  if (!std::is_same<T, bf16>::value) return x;
  return {MZ_SHUFFLE(x.first, x.second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
          MZ_SHUFFLE(x.first, x.second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
}

// --- lanes ----------------------------------------------------------------------------------------------------------

MZ_INLINE I lane() { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
MZ_INLINE F first_lanes(F x, int64_t n, float other) { return lane() < (int32_t)(n < LANES ? n : LANES) ? x : splat(other); }

// A tree, so that the order of additions does not depend on the width of the machine's registers.
MZ_INLINE float sum(F x) {
  x += MZ_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += MZ_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += MZ_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return x[0] + x[1];
}
MZ_INLINE float max(F x) {
  x = maximum(x, MZ_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = maximum(x, MZ_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = maximum(x, MZ_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return maximum(x, MZ_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))[0];
}

}  // namespace mz
