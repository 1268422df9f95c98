// Definitions for both passes of attention: memory layouts, and which query sees which keys.
//
// s sequence, b micro-batch, g key-value heads, r query heads of each, d head dim. The projection is [s, b, g, r + 2,
// d]: slots 0..r-1 of a group are its queries, r its key, r + 1 its value. Scores are in base 2: scale and slopes are
// multiplied by log2 e, so that a weight is 2^(score - largest).
#pragma once

#include "../cpu/functions.h"
#include "tile.h"

namespace mz {

struct Attention {
  int64_t s, b, groups, repeats, d;
  float scale;           // of the scores, in base e
  const float* slopes;   // [g r] or null
  const int64_t* documents;  // [b, s] or null
  int64_t window, chunk;     // a query's keys are the last `window` ones, or those of its chunk; 0: all
  float cap;                 // scores become cap tanh(score / cap) before ALiBi's bias; 0: no cap

  int64_t heads() const { return groups * repeats; }
  int64_t planes() const { return b * groups; }                 // a plane: one group of one sample
  int64_t wide() const { return round_up(d, EDGE); }            // d as tiles have it
  int64_t stride() const { return b * groups * (repeats + 2) * d; }  // from one position to the next in the projection
  int64_t slot(int64_t plane, int64_t r) const { return (plane * (repeats + 2) + r) * d; }
  int64_t out_stride() const { return b * heads() * d; }        // from one position to the next in the context
  int64_t out_slot(int64_t plane, int64_t r) const { return (plane * repeats + r) * d; }
  int64_t row_of(int64_t plane, int64_t r) const { return (plane * repeats + r) * s; }  // in [b, g r, s]
  float slope(int64_t plane, int64_t r) const { return slopes ? slopes[plane % groups * repeats + r] * LOG2_E : 0.0f; }
};

// The score of a product of a query and a key in base 2, and the share of the score's gradient that reaches the product.
template <bool CAPPED> struct Score {
  float inner, outer;

  explicit Score(const Attention& a) : inner(CAPPED ? a.scale / a.cap : a.scale * LOG2_E), outer(CAPPED ? a.cap * LOG2_E : 1.0f) {}
  MZ_MEMBER F bounded(F product) const { return CAPPED ? hyperbolic_tangent(product * inner) : product * inner; }
  MZ_MEMBER F of(F bounded) const { return CAPPED ? bounded * outer : bounded; }
  MZ_MEMBER F through(F change, F bounded) const { return CAPPED ? change * (1.0f - bounded) * (1.0f + bounded) : change; }
};

// Query i of a sample sees keys begin[i] .. i, and key k is seen by queries k .. end[k] - 1.
class Sight {
  std::vector<int32_t> begins, ends;
  int64_t s;

 public:
  explicit Sight(const Attention& a) : begins(a.b * a.s), ends(a.b * a.s, (int32_t)a.s), s(a.s) {
    if (a.documents) bound_by_documents(a);
    if (a.window || a.chunk) bound_by_reach(a);
  }
  const int32_t* begin(int64_t sample) const { return begins.data() + sample * s; }
  const int32_t* end(int64_t sample) const { return ends.data() + sample * s; }

 private:
  void bound_by_documents(const Attention& a) {
    for (int64_t first = 0; first < a.b * s; first += s) {
      for (int64_t i = 1; i < s; ++i)
        begins[first + i] = a.documents[first + i] == a.documents[first + i - 1] ? begins[first + i - 1] : (int32_t)i;
      for (int64_t i = s - 2; i >= 0; --i)
        ends[first + i] = a.documents[first + i] == a.documents[first + i + 1] ? ends[first + i + 1] : (int32_t)(i + 1);
    }
  }
  void bound_by_reach(const Attention& a) {
    for (int64_t first = 0; first < a.b * s; first += s)
      for (int64_t i = 0; i < s; ++i) {
        int64_t begin = a.window ? i - a.window + 1 : round_down(i, a.chunk);
        int64_t end = a.window ? std::min(a.window, s) + i : round_down(i, a.chunk) + std::min(a.chunk, s);  // no overflow
        begins[first + i] = (int32_t)std::max<int64_t>(begins[first + i], begin);
        ends[first + i] = (int32_t)std::min<int64_t>(ends[first + i], end);
      }
  }
};

MZ_INLINE F positions() { return to_float(lane()); }
MZ_INLINE F within(F x, int64_t j, int64_t low, int64_t high, float other) {  // lanes j.. of a row outside [low, high) replaced
  I at = lane() + (int32_t)j;
  return choose((at >= (int32_t)low) & (at < (int32_t)high), x, splat(other));
}

}  // namespace mz
