// Sixteen float lanes, loads and stores of float, bfloat16 and half, and sums over lanes.
//
// It uses the compiler's vector types (lanes.h), and intrinsics only where the compiler does not find a single
// instruction itself. So a kernel is written once: the same source compiles to one AVX-512 register, two of AVX2, or four
// of SSE2 or NEON. Every function propagates NaN as its float64 specification does.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lanes.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace mz {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// Significant bits of a storage type. Results that are stored in T are computed to a few bits more than these.
template <typename T> constexpr int DIGITS = 24;
template <> constexpr int DIGITS<bf16> = 8;
template <> constexpr int DIGITS<fp16> = 11;

MZ_INLINE F splat(float x) { return F{} + x; }
template <typename V> MZ_INLINE V maximum(V a, V b) { return choose((a > b) | (a != a), a, b); }  // NaN in either one stays
// The larger one; `best` where x is NaN.
#ifdef __AVX512F__
MZ_INLINE F larger(F best, F x) { return (F)_mm512_max_ps((__m512)x, (__m512)best); }
#else
MZ_INLINE F larger(F best, F x) { return choose(x > best, x, best); }
#endif

#ifdef __AVX512F__  // these instructions return their second operand where one is NaN
MZ_INLINE F at_most(F x, float top) { return (F)_mm512_min_ps(_mm512_set1_ps(top), (__m512)x); }
MZ_INLINE F at_least(F x, float bottom) { return (F)_mm512_max_ps(_mm512_set1_ps(bottom), (__m512)x); }
#else
MZ_INLINE F at_most(F x, float top) { return choose(x > top, splat(top), x); }
MZ_INLINE F at_least(F x, float bottom) { return choose(x < bottom, splat(bottom), x); }
#endif
MZ_INLINE F plus(F a, F b) { return a + b; }
MZ_INLINE F magnitude(F x) { return as_float(as_int(x) & 0x7fffffff); }
MZ_INLINE F below_zero(F x) { return as_float(as_int(x) | (int32_t)0x80000000); }  // -|x|

// --- loads and stores: whole vectors, or the first n lanes (the others are 0) ---------------------------------------

MZ_INLINE NativeF load_native(const float* p) { NativeF x; memcpy(&x, p, sizeof x); return x; }
MZ_INLINE void store_native(float* p, NativeF x) { memcpy(p, &x, sizeof x); }

// A register of 16-bit numbers as floats.
#if defined(__AVX512F__)
MZ_INLINE NativeF load_native(const bf16* p) {
  return (NativeF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
}
MZ_INLINE NativeF load_native(const fp16* p) {
  return (NativeF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MZ_INLINE void store_native(fp16* p, NativeF x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
MZ_INLINE NativeF load_native(const bf16* p) {
  return (NativeF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
}
MZ_INLINE NativeF load_native(const fp16* p) {
  return (NativeF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MZ_INLINE void store_native(fp16* p, NativeF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#else
MZ_INLINE NativeF load_native(const bf16* p) {
  NativeH half; memcpy(&half, p, sizeof half);
  return (NativeF)(__builtin_convertvector(half, NativeU) << 16);
}
// Without the instruction the compiler's own half type converts; it exists wherever SSE2 or NEON does.
MZ_INLINE NativeF load_native(const fp16* p) {
  NativeF x;
  for (int i = 0; i < NATIVE; ++i) { _Float16 h; memcpy(&h, p + i, 2); x[i] = (float)h; }
  return x;
}
MZ_INLINE void store_native(fp16* p, NativeF x) {
  for (int i = 0; i < NATIVE; ++i) { _Float16 h = (_Float16)x[i]; memcpy(p + i, &h, 2); }
}
#endif

template <typename T> MZ_INLINE F load_parts(const T* p) {
  NativeF parts[PARTS];
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) parts[i] = load_native(p + i * NATIVE);
  return of_parts(parts);
}
template <typename T> MZ_INLINE void store_parts(T* p, F x) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) store_native(p + i * NATIVE, part_of(x, i));
}
MZ_INLINE F load(const float* p) { return load_parts(p); }
MZ_INLINE F load(const bf16* p) { return load_parts(p); }
MZ_INLINE F load(const fp16* p) { return load_parts(p); }
MZ_INLINE void store(float* p, F x) { store_parts(p, x); }
MZ_INLINE void store(fp16* p, F x) { store_parts(p, x); }

MZ_INLINE void narrowed(bf16* p, U x) {
#ifdef __AVX512F__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)x));
#else
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) {
    NativeH half = __builtin_convertvector(x.part[i], NativeH);
    memcpy((void*)(p + i * NATIVE), &half, sizeof half);
  }
#endif
}

// Round to nearest, ties to even; a NaN keeps its sign and becomes quiet instead of being rounded into an infinity.
MZ_INLINE U rounded(F x) {
  U bits = as_unsigned(x), quiet = bits | 0x400000u, even = bits + 0x7fffu + ((bits >> 16) & 1u);
  return choose(x == x, even, quiet);  // in the upper half
}
MZ_INLINE void store_exact(bf16* p, F x) { narrowed(p, rounded(x) >> 16); }

// The processor's own conversion does the same, but flushes numbers below the smallest normal one (1.2e-38) to 0.
#ifdef __AVX512BF16__
MZ_INLINE void store(bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#else
MZ_INLINE void store(bf16* p, F x) { store_exact(p, x); }
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

MZ_INLINE F square_root(F x) {
  float values[LANES];  // the compiler has one instruction for this loop
  store(values, x);
  for (int i = 0; i < LANES; ++i) values[i] = __builtin_sqrtf(values[i]);
  return load(values);
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
  U words = as_unsigned(load(reinterpret_cast<const float*>(p)));
  return {as_float(words << 16), as_float(words & 0xffff0000u)};
}
MZ_INLINE void store_two(bf16* p, Two x) {
#ifdef __AVX512BF16__
  const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                          19, 3, 18, 2, 17, 1, 16, 0);
  __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)x.second, (__m512)x.first);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(places, halves));
#else
  store(reinterpret_cast<float*>(p), as_float((rounded(x.first) >> 16) | (rounded(x.second) & 0xffff0000u)));
#endif
}

// The same values in the order of memory.
template <typename T> MZ_INLINE Two in_order(Two x) {
  if (!std::is_same<T, bf16>::value) return x;
  NativeF parts[2][PARTS];
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) {
    NativeF even = part_of(x.first, i), odd = part_of(x.second, i);
#if defined(__AVX512F__)
    NativeF low = MZ_SHUFFLE(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    NativeF high = MZ_SHUFFLE(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    NativeF low = MZ_SHUFFLE(even, odd, 0, 8, 1, 9, 2, 10, 3, 11), high = MZ_SHUFFLE(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    NativeF low = MZ_SHUFFLE(even, odd, 0, 4, 1, 5), high = MZ_SHUFFLE(even, odd, 2, 6, 3, 7);
#endif
    parts[2 * i / PARTS][2 * i % PARTS] = low, parts[(2 * i + 1) / PARTS][(2 * i + 1) % PARTS] = high;
  }
  return {of_parts(parts[0]), of_parts(parts[1])};
}

// --- over lanes -----------------------------------------------------------------------------------------------------

MZ_INLINE F first_lanes(F x, int64_t n, float other) { return choose(lane() < (int32_t)(n < LANES ? n : LANES), x, splat(other)); }

// Lanes i and i + 8, then i + 4, and so on: a tree, so that the order of additions does not depend on the width of the
// machine's registers. In the end lanes 0 and 1 have what has still to be combined.
template <typename Op> MZ_INLINE NativeF tree_of_parts(F x, const Op& op) {
  NativeF parts[PARTS];
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) parts[i] = part_of(x, i);
#pragma GCC unroll 4
  for (int half = PARTS / 2; half; half /= 2)
#pragma GCC unroll 4
    for (int i = 0; i < half; ++i) parts[i] = op(parts[i], parts[i + half]);
  return parts[0];
}
template <typename Op> MZ_INLINE float over_lanes(F all, const Op& op) {
  NativeF x = tree_of_parts(all, op);
#if defined(__AVX512F__)
  x = op(x, MZ_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = op(x, MZ_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = op(x, MZ_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return op(x, MZ_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))[0];
#elif defined(__AVX2__)
  x = op(x, MZ_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = op(x, MZ_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return op(x, MZ_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6))[0];
#else
  x = op(x, MZ_SHUFFLE(x, x, 2, 3, 0, 1));
  return op(x, MZ_SHUFFLE(x, x, 1, 0, 3, 2))[0];
#endif
}
struct Plus { template <typename V> MZ_MEMBER V operator()(V a, V b) const { return a + b; } };
struct Maximum { template <typename V> MZ_MEMBER V operator()(V a, V b) const { return maximum(a, b); } };
MZ_INLINE float sum(F x) { return over_lanes(x, Plus{}); }
MZ_INLINE float max(F x) { return over_lanes(x, Maximum{}); }

// Lane i is the sum of v[i], in the order of `sum`, for several vectors at once: each round adds the halves of two
// vectors and puts the results beside each other.
MZ_INLINE F sums_of(const F (&v)[LANES]) {
  NativeF x[LANES], parts[PARTS];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) x[i] = tree_of_parts(v[i], Plus{});
#define MZ_ADD_HALVES(TO, COUNT, FIRST, SECOND) \
  _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; ++i) TO[i] = MZ_SHUFFLE(x[2 * i], x[2 * i + 1], FIRST) + MZ_SHUFFLE(x[2 * i], x[2 * i + 1], SECOND);
#define MZ_LIST(...) __VA_ARGS__
#if defined(__AVX512F__)
  MZ_ADD_HALVES(x, 8, MZ_LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), MZ_LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  MZ_ADD_HALVES(x, 4, MZ_LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27), MZ_LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
  MZ_ADD_HALVES(x, 2, MZ_LIST(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29), MZ_LIST(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
  MZ_ADD_HALVES(parts, 1, MZ_LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), MZ_LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#elif defined(__AVX2__)
  MZ_ADD_HALVES(x, 8, MZ_LIST(0, 1, 2, 3, 8, 9, 10, 11), MZ_LIST(4, 5, 6, 7, 12, 13, 14, 15))
  MZ_ADD_HALVES(x, 4, MZ_LIST(0, 1, 4, 5, 8, 9, 12, 13), MZ_LIST(2, 3, 6, 7, 10, 11, 14, 15))
  MZ_ADD_HALVES(parts, 2, MZ_LIST(0, 2, 4, 6, 8, 10, 12, 14), MZ_LIST(1, 3, 5, 7, 9, 11, 13, 15))
#else
  MZ_ADD_HALVES(x, 8, MZ_LIST(0, 1, 4, 5), MZ_LIST(2, 3, 6, 7))
  MZ_ADD_HALVES(parts, 4, MZ_LIST(0, 2, 4, 6), MZ_LIST(1, 3, 5, 7))
#endif
#undef MZ_LIST
#undef MZ_ADD_HALVES
  return of_parts(parts);
}

}  // namespace mz
