// Functions of the feed-forward layer and their slopes, of one float.
#pragma once

#include "numbers.h"

namespace mz {

// 1 / (1 + e^-x) and 1 / (1 + e^x), neither of them a difference of near numbers.
struct Shares { float own, rest; };
MZ_DEVICE Shares logistic(float x) {
  float e = exp2f(-fabsf(x) * LOG2_E), near = 1.0f / (1.0f + e), far = e * near;
  return x < 0.0f ? Shares{far, near} : Shares{near, far};
}

// v Phi(v).
struct Gelu {
  static MZ_DEVICE float phi(float v) { return 0.5f * erfcf(v * -0.70710678118654752f); }
  static MZ_DEVICE float value(float v) { return v * phi(v); }
  static MZ_DEVICE float back(float v, float grad) { return grad * (phi(v) + v * (0.3989422804014327f * exp2f(-0.5f * LOG2_E * v * v))); }
};

// v/2 (1 + tanh u) = v s, s = 1 / (1 + e^-2u), u = sqrt(2/pi) (v + 0.044715 v^3); slope s + v s (1 - s) (2u)'.
struct GeluTanh {
  static constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481627260025f;  // 2 sqrt(2/pi), times 0.044715
  static MZ_DEVICE Shares shares(float v) { return logistic(v * (LINEAR + CUBIC * (v * v))); }
  static MZ_DEVICE float value(float v) { return v * shares(v).own; }
  static MZ_DEVICE float back(float v, float grad) {
    Shares s = shares(v);
    return grad * (s.own + v * (s.own * s.rest) * (LINEAR + 3.0f * CUBIC * (v * v)));
  }
};

struct Relu {
  static MZ_DEVICE float value(float v) { return v <= 0.0f ? 0.0f : v; }                    // a NaN is not <= 0
  static MZ_DEVICE float back(float v, float grad) { return v <= 0.0f ? 0.0f : grad; }  // stops even an infinite gradient
};

}  // namespace mz
