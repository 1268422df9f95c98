// Sixteen lanes as several registers, for processors whose registers hold fewer.
//
// The compiler has vectors of 64 bytes for every processor. But where registers are shorter, it compares, chooses and
// shuffles them lane by lane, which made an activation four times slower on AVX2.
#pragma once

#include <cstdint>
#include <type_traits>

#define MZ_INLINE static inline __attribute__((always_inline))
#define MZ_MEMBER inline __attribute__((always_inline))

namespace mz {

constexpr int LANES = 16;

// Lanes of a register.
#if defined(__AVX512F__)
constexpr int NATIVE = 16;
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif

// A register of elements of four bytes, and half of one, of two.
typedef float NativeF __attribute__((vector_size(4 * NATIVE)));
typedef int32_t NativeI __attribute__((vector_size(4 * NATIVE)));
typedef uint32_t NativeU __attribute__((vector_size(4 * NATIVE)));
typedef uint16_t NativeH __attribute__((vector_size(2 * NATIVE)));

#ifdef __clang__
#define MZ_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MZ_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, mz::NativeI{__VA_ARGS__})
#endif

// a where the mask has -1, b where it has 0.
template <typename Mask, typename V> MZ_INLINE V choose(Mask mask, V a, V b) { return mask ? a : b; }

#ifdef __AVX512F__

typedef NativeF F;
typedef NativeI I;
typedef NativeU U;

constexpr int PARTS = 1;
MZ_INLINE NativeF part_of(F x, int) { return x; }
MZ_INLINE F of_parts(const NativeF (&parts)[1]) { return parts[0]; }
MZ_INLINE I as_int(F x) { return (I)x; }
MZ_INLINE U as_unsigned(F x) { return (U)x; }
MZ_INLINE F as_float(I x) { return (F)x; }
MZ_INLINE F as_float(U x) { return (F)x; }
MZ_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }
MZ_INLINE I to_int(F x) { return __builtin_convertvector(x, I); }
MZ_INLINE I lane() { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

#else

constexpr int PARTS = LANES / NATIVE;

template <typename E> struct Lanes {
  typedef E Part __attribute__((vector_size(4 * NATIVE)));
  Part part[PARTS];
  MZ_MEMBER E operator[](int64_t i) const { return part[i / NATIVE][i % NATIVE]; }
};
typedef Lanes<float> F;
typedef Lanes<int32_t> I;
typedef Lanes<uint32_t> U;

#define MZ_EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; ++p)

template <typename E> using Scalar = std::common_type_t<E>;  // converted to the lanes' type, not deduced

#define MZ_OPERATOR(RESULT, OP)                                                                                             \
  template <typename E> MZ_INLINE Lanes<RESULT> operator OP(Lanes<E> a, Lanes<E> b) {                                       \
    Lanes<RESULT> c;                                                                                                        \
    MZ_EACH_PART c.part[p] = a.part[p] OP b.part[p];                                                                        \
    return c;                                                                                                               \
  }                                                                                                                         \
  template <typename E> MZ_INLINE Lanes<RESULT> operator OP(Lanes<E> a, Scalar<E> b) {                                      \
    Lanes<RESULT> c;                                                                                                        \
    MZ_EACH_PART c.part[p] = a.part[p] OP b;                                                                                \
    return c;                                                                                                               \
  }                                                                                                                         \
  template <typename E> MZ_INLINE Lanes<RESULT> operator OP(Scalar<E> a, Lanes<E> b) {                                      \
    Lanes<RESULT> c;                                                                                                        \
    MZ_EACH_PART c.part[p] = a OP b.part[p];                                                                                \
    return c;                                                                                                               \
  }
#define MZ_ASSIGNING(OP)                                                                                    \
  MZ_OPERATOR(E, OP)                                                                                        \
  template <typename E> MZ_INLINE Lanes<E>& operator OP##=(Lanes<E>& a, Lanes<E> b) { return a = a OP b; }  \
  template <typename E> MZ_INLINE Lanes<E>& operator OP##=(Lanes<E>& a, Scalar<E> b) { return a = a OP b; }
MZ_ASSIGNING(+) MZ_ASSIGNING(-) MZ_ASSIGNING(*) MZ_ASSIGNING(/) MZ_ASSIGNING(&) MZ_ASSIGNING(|) MZ_ASSIGNING(^)
MZ_ASSIGNING(<<) MZ_ASSIGNING(>>)
MZ_OPERATOR(int32_t, <) MZ_OPERATOR(int32_t, <=) MZ_OPERATOR(int32_t, >) MZ_OPERATOR(int32_t, >=)
MZ_OPERATOR(int32_t, ==) MZ_OPERATOR(int32_t, !=)
#undef MZ_OPERATOR
#undef MZ_ASSIGNING

template <typename E> MZ_INLINE Lanes<E> operator-(Lanes<E> x) {
  MZ_EACH_PART x.part[p] = -x.part[p];
  return x;
}
template <typename E> MZ_INLINE Lanes<E> choose(I mask, Lanes<E> a, Lanes<E> b) {
  MZ_EACH_PART a.part[p] = mask.part[p] ? a.part[p] : b.part[p];
  return a;
}

// The same bits, or the same numbers, as another type.
template <typename To, typename From> MZ_INLINE Lanes<To> same_bits(Lanes<From> x) {
  Lanes<To> y;
  MZ_EACH_PART y.part[p] = (typename Lanes<To>::Part)x.part[p];
  return y;
}
template <typename To, typename From> MZ_INLINE Lanes<To> converted(Lanes<From> x) {
  Lanes<To> y;
  MZ_EACH_PART y.part[p] = __builtin_convertvector(x.part[p], typename Lanes<To>::Part);
  return y;
}
MZ_INLINE NativeF part_of(F x, int p) { return x.part[p]; }
MZ_INLINE F of_parts(const NativeF (&parts)[PARTS]) {
  F x;
  MZ_EACH_PART x.part[p] = parts[p];
  return x;
}
MZ_INLINE I as_int(F x) { return same_bits<int32_t>(x); }
MZ_INLINE U as_unsigned(F x) { return same_bits<uint32_t>(x); }
MZ_INLINE F as_float(I x) { return same_bits<float>(x); }
MZ_INLINE F as_float(U x) { return same_bits<float>(x); }
MZ_INLINE F to_float(I x) { return converted<float>(x); }
MZ_INLINE I to_int(F x) { return converted<int32_t>(x); }
MZ_INLINE I lane() {
  I x;
#ifdef __AVX2__
  MZ_EACH_PART x.part[p] = NativeI{0, 1, 2, 3, 4, 5, 6, 7} + NATIVE * p;
#else
  MZ_EACH_PART x.part[p] = NativeI{0, 1, 2, 3} + NATIVE * p;
#endif
  return x;
}

#endif

}  // namespace mz
