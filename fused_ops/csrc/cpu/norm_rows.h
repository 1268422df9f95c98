// A row that is normalised, and back.
#pragma once

#include "rows.h"

namespace mz {

template <bool CENTRED, typename T>
MZ_INLINE void normalise_row(int64_t h, T* y, const T* x, const T* weight, const T* bias, float offset, float eps,
                               float* mean, float* scale) {
  float centre = 0.0f;
  if (CENTRED) {
    F total = splat(0.0f);
    each_part<T>(h, [&](int64_t i, auto at) MZ_LAMBDA { total = fold(plus, total, at.load(x + i)); });
    *mean = centre = sum(total) / h;
  }
  F squares = splat(0.0f);
  each_part<T>(h, [&](int64_t i, auto at) MZ_LAMBDA {
    auto distance = at.or_else(at.load(x + i) - centre, 0.0f);
    squares = fold(plus, squares, distance * distance);
  });
  float factor = *scale = 1.0f / __builtin_sqrtf(sum(squares) / h + eps);
  if (CENTRED) map(h, y, [&](F x, F weight, F bias) MZ_LAMBDA { return (x - centre) * factor * weight + bias; }, x, weight, bias);
  else map(h, y, [&](F x, F weight) MZ_LAMBDA { return x * factor * (weight + offset); }, x, weight);
}

// With u = (x - mean) scale and d = grad (weight + offset): dx = scale (d - mean(d) - u mean(d u)) (+ passed, the gradient of
// the sum itself). Adds grad u to the `own` sums of the weight's gradient, and grad to those of the bias behind them.
template <bool CENTRED, typename T>
MZ_INLINE void normalise_row_backward(int64_t h, T* out, float* own, const T* g, const T* other, const T* in, const T* weight,
                                        float offset, float centre, float factor) {
  F first = splat(0.0f), second = splat(0.0f);
  each_part<T>(h, [&](int64_t i, auto at) MZ_LAMBDA {
    auto unit = (at.load(in + i) - centre) * factor, incoming = at.load(g + i);
    auto weighted = incoming * lift([&](F weight) MZ_LAMBDA { return weight + offset; }, at.load(weight + i));
    if (CENTRED) first = fold(plus, first, weighted);
    second = fold(plus, second, at.or_else(weighted * unit, 0.0f));
    at.put_sums(own + i, at.sums(own + i) + incoming * unit);
    if (CENTRED) at.put_sums(own + h + i, at.sums(own + h + i) + incoming);
  });
  float mean_d = CENTRED ? sum(first) / h : 0.0f, mean_du = sum(second) / h;
  auto back = [&](F x, F grad, F weight) MZ_LAMBDA {
    return (grad * (weight + offset) - mean_d - (x - centre) * factor * mean_du) * factor;
  };
  if (other) map(h, out, [&](F x, F grad, F weight, F passed) MZ_LAMBDA { return back(x, grad, weight) + passed; }, in, g, weight, other);
  else map(h, out, back, in, g, weight);
}

}  // namespace mz
