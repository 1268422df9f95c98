// Functions of the feed-forward layer and their slopes, of one float.
#pragma once

#include "numbers.h"

namespace mz {

// 1 / (1 + e^-x) and 1 / (1 + e^x), neither of them a difference of near numbers.
struct Shares { float own, rest; };
MZ_DEVICE Shares logistic(float x) {
  float e = power_of_two(-fabsf(x) * LOG2_E), near = inverse(1.0f + e), far = e * near;
  return x < 0.0f ? Shares{far, near} : Shares{near, far};
}

// v s, s = 1 / (1 + e^-v); slope s + v s (1 - s).
template <typename T> struct Silu {
  static MZ_DEVICE float value(float v) { return v * logistic(v).own; }
  static MZ_DEVICE float back(float v, float grad) {
    Shares s = logistic(v);
    return grad * (s.own + v * (s.own * s.rest));
  }
};

// v Phi(v). Phi(-a) = exp(-a^2 / 2) t P(t) with t = 1 / (1 + a/4), a >= 0; P as in csrc/cpu/activation.cpp: to a relative error of 4e-8, so
// that the tail keeps its digits, and of 1.1e-5 where the result has 16 bits. One exponential serves the value and the slope.
template <typename T> struct Gelu {
  static MZ_DEVICE float bell(float v) { return power_of_two(v * v * (-0.5f * LOG2_E)); }
  static MZ_DEVICE float phi(float v, float bell) {
    float t = inverse(1.0f + fminf(fabsf(v), 40.0f) * 0.25f), below = bell * t * (sizeof(T) < 4 ? short_form(t) : full_form(t));
    return v > 0.0f ? 1.0f - below : below;
  }
  static MZ_DEVICE float short_form(float t) {
    float p = -0.057004138827323914f * t + 0.21571649610996246f;
    p = p * t - 0.08355764299631119f;
    p = p * t + 0.14484508335590363f;
    p = p * t + 0.07900294661521912f;
    p = p * t + 0.10133279860019684f;
    return p * t + 0.09967004507780075f;
  }
  static MZ_DEVICE float full_form(float t) {
    float p = 0.01978323608636856f * t - 0.08088228106498718f;
    p = p * t + 0.09560538548140717f;
    p = p * t - 0.03172484412789345f;
    p = p * t + 0.06370282173156738f;
    p = p * t + 0.058974068611860275f;
    p = p * t + 0.0816032811999321f;
    p = p * t + 0.09346634149551392f;
    p = p * t + 0.09973642975091934f;
    return p * t + 0.0997355654835701f;
  }
  static MZ_DEVICE float value(float v) { return v * phi(v, bell(v)); }
  static MZ_DEVICE float back(float v, float grad) {
    float b = bell(v);
    return grad * (phi(v, b) + v * (b * 0.3989422804014327f));
  }
};

// v/2 (1 + tanh u) = v s, s = 1 / (1 + e^-2u), u = sqrt(2/pi) (v + 0.044715 v^3); slope s + v s (1 - s) (2u)'.
template <typename T> struct GeluTanh {
  static constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481627260025f;  // 2 sqrt(2/pi), times 0.044715
  static MZ_DEVICE Shares shares(float v) { return logistic(v * (LINEAR + CUBIC * (v * v))); }
  static MZ_DEVICE float value(float v) { return v * shares(v).own; }
  static MZ_DEVICE float back(float v, float grad) {
    Shares s = shares(v);
    return grad * (s.own + v * (s.own * s.rest) * (LINEAR + 3.0f * CUBIC * (v * v)));
  }
};

template <typename T> struct Relu {
  static MZ_DEVICE float value(float v) { return v <= 0.0f ? 0.0f : v; }                    // a NaN is not <= 0
  static MZ_DEVICE float back(float v, float grad) { return v <= 0.0f ? 0.0f : grad; }  // stops even an infinite gradient
};

// max(v, 0)^2.
template <typename T> struct Relu2 {
  static MZ_DEVICE float value(float v) { return v <= 0.0f ? 0.0f : v * v; }
  static MZ_DEVICE float back(float v, float grad) { return v <= 0.0f ? 0.0f : grad * (v + v); }
};

}  // namespace mz
