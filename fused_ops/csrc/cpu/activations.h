// Functions of the feed-forward layer and their slopes, of a vector.
#pragma once

#include "functions.h"

namespace mz {

// x s, s = 1 / (1 + e^-x); slope s + x s (1 - s).
template <typename T> struct Silu {
  MZ_INLINE Shares shares(F x) { return logistic2<T>(x * LOG2_E); }
  MZ_INLINE F value(F x) { return x * shares(x).own; }
  MZ_INLINE F slope(F x) {
    Shares s = shares(x);
    return s.own + x * (s.own * s.rest);
  }
  MZ_INLINE F back(F x, F grad) { return grad * slope(x); }
};

// x Phi(x). Phi(-a) = exp(-a^2 / 2) t P(t) with t = 1 / (1 + a/4), a >= 0. P is a polynomial fitted to a relative error
// of 4e-8 (also in the tail), for 16-bit types of 1.1e-5. The value and the slope need one exponential each.
template <typename T> struct Gelu {
  MZ_INLINE F bell(F x) { return exp2<T>(x * x * (-0.5f * LOG2_E)); }
  MZ_INLINE F tail(F a, F bell) {
    F t = inverse<T>(1.0f + at_most(a, 40.0f) * 0.25f);  // the bell is 0 long before
    return bell * t * (DIGITS<T> < 24 ? short_form(t) : full_form(t));
  }
  MZ_INLINE F short_form(F t) {
    F p = splat(-0.057004138827323914f) * t + 0.21571649610996246f;
    p = p * t - 0.08355764299631119f;
    p = p * t + 0.14484508335590363f;
    p = p * t + 0.07900294661521912f;
    p = p * t + 0.10133279860019684f;
    return p * t + 0.09967004507780075f;
  }
  MZ_INLINE F full_form(F t) {
    F p = splat(0.01978323608636856f) * t - 0.08088228106498718f;
    p = p * t + 0.09560538548140717f;
    p = p * t - 0.03172484412789345f;
    p = p * t + 0.06370282173156738f;
    p = p * t + 0.058974068611860275f;
    p = p * t + 0.0816032811999321f;
    p = p * t + 0.09346634149551392f;
    p = p * t + 0.09973642975091934f;
    return p * t + 0.0997355654835701f;
  }
  MZ_INLINE F share(F x, F bell) {
    F below = tail(magnitude(x), bell);
    return choose(x > 0.0f, 1.0f - below, below);
  }
  MZ_INLINE F value(F x) { return x * share(x, bell(x)); }
  MZ_INLINE F slope(F x) {
    F b = bell(x);
    return share(x, b) + x * (b * 0.3989422804014327f);
  }
  MZ_INLINE F back(F x, F grad) { return grad * slope(x); }
};

// x/2 (1 + tanh u) = x s, s = 1 / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3); slope s + x s (1 - s) (2u)'.
template <typename T> struct GeluTanh {
  static constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481627260025f;  // 2 sqrt(2/pi), times 0.044715
  MZ_INLINE Shares shares(F x) { return logistic2<T>(x * (LINEAR * LOG2_E + (CUBIC * LOG2_E) * (x * x))); }
  MZ_INLINE F value(F x) { return x * shares(x).own; }
  MZ_INLINE F slope(F x) {
    Shares s = shares(x);
    return s.own + x * (s.own * s.rest) * (LINEAR + (3.0f * CUBIC) * (x * x));
  }
  MZ_INLINE F back(F x, F grad) { return grad * slope(x); }
};

template <typename T> struct Relu {
  MZ_INLINE F value(F x) { return choose(x <= 0.0f, splat(0.0f), x); }  // NaN is not <= 0
  MZ_INLINE F back(F x, F grad) { return choose(x <= 0.0f, splat(0.0f), grad); }  // stops even an infinite gradient
};

// max(x, 0)^2.
template <typename T> struct Relu2 {
  MZ_INLINE F value(F x) { return choose(x <= 0.0f, splat(0.0f), x * x); }
  MZ_INLINE F back(F x, F grad) { return choose(x <= 0.0f, splat(0.0f), grad * (x + x)); }
};

}  // namespace mz
