// Elementary functions whose precision depends on the type in which the result is stored: f<float> has about 2 ulp of
// fp32, f<bf16> and f<fp16> less than 1/16 of their type's rounding. For a sum that stays in fp32, such as one of
// exponentials, f<float> is used.
//
// Every function propagates NaN and has its limits at the infinities.
#pragma once

#include "vec.h"

namespace mz {

constexpr float LOG2_E = 1.44269504088896341f;

// 2^r for 0 <= r <= 1; polynomials fitted here to relative errors of 8e-5 (bf16), 3e-6 (fp16) and 8e-8.
template <typename T> MZ_INLINE F exp2_of_fraction(F r) {
  if constexpr (DIGITS<T> <= 8) {
    F p = splat(0.07802452147006989f) * r + 0.22606715559959412f;
    p = p * r + 0.6958335638046265f;
    return p * r + 0.9999251961708069f;
  } else if constexpr (DIGITS<T> <= 11) {
    F p = splat(0.013534167781472206f) * r + 0.052011460065841675f;
    p = p * r + 0.2414427548646927f;
    p = p * r + 0.6930038332939148f;
    return p * r + 1.0000026226043701f;
  } else {
    F p = splat(0.0018775766948238015f) * r + 0.00898933969438076f;
    p = p * r + 0.05582631751894951f;
    p = p * r + 0.24015361070632935f;
    p = p * r + 0.6931530833244324f;
    return p * r + 0.9999999403953552f;
  }
}

// 2^x. Results below the smallest normal number may be 0.
template <typename T> MZ_INLINE F exp2(F x) {
#ifdef __AVX512F__
  // x - floor(x), which is 0 for the infinities, and a product with 2^floor(x).
  F r = (F)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return (F)_mm512_scalef_ps((__m512)exp2_of_fraction<T>(r), (__m512)x);
#else
  F c = at_most(at_least(x, -126.75f), 128.25f);  // whose floors are -127 and 128
  F magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 rounds to an integer n; the bits of the exponent of 2^n are n + 127
  F shifted = (c - 0.5f) + magic;
  return exp2_of_fraction<T>(c - (shifted - magic)) * as_float(as_int(shifted) << 23);  // 2^-127 reads as 0, 2^128 as inf
#endif
}

// 1 / x, without a division where the processor allows it. x is neither 0 nor subnormal. Only for f<bf16> it may be
// infinite.
template <typename T> MZ_INLINE F inverse(F x) {
#ifdef __AVX512F__
  F guess = (F)_mm512_rcp14_ps((__m512)x);  // to 2^-14
  if constexpr (DIGITS<T> <= 8) return guess;
  return guess + guess * (1.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

// tanh x: x times a polynomial of x^2 (fitted here to a relative error of 4e-8) near 0, where 1 - 2 / (1 + e^2|x|) would
// lose digits. It has the precision of f<float>.
MZ_INLINE F hyperbolic_tangent(F x) {
  F square = x * x, size = at_most(magnitude(x), 10.0f);  // tanh 10 rounds to 1
  F p = splat(0.016101524233818054f) * square - 0.05247267335653305f;
  p = p * square + 0.1331692487001419f;
  p = p * square - 0.33332693576812744f;
  p = p * square + 0.9999999403953552f;
  F far = 1.0f - 2.0f * inverse<float>(1.0f + exp2<float>(size * (2.0f * LOG2_E)));
  return choose(size < 0.5625f, x * p, as_float(as_int(far) | (as_int(x) & (int32_t)0x80000000)));
}

// 1 / (1 + 2^-t) and 1 / (1 + 2^t), neither of them a difference of near numbers. (t = x log2 e: the logistic functions
// of x and -x.)
struct Shares { F own, rest; };
template <typename T> MZ_INLINE Shares logistic2(F t) {
  if constexpr (DIGITS<T> <= 8) {
    F e = exp2<T>(-t), own = inverse<T>(1.0f + e);
    return {own, at_most(e, std::numeric_limits<float>::max()) * own};  // not inf * 0
  }
  F e = exp2<T>(below_zero(t)), near = inverse<T>(1.0f + e), far = e * near;
  return {choose(t < 0.0f, far, near), choose(t < 0.0f, near, far)};
}

}  // namespace mz
