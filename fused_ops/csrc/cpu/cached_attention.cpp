// Attention of a few new tokens to the cached keys and values of all tokens before them.
//
// b rows of s new tokens. Row i continues slot slots[i] of the cache at position positions[i]. The projection of the
// new tokens is [s, b, g, r + 2, d] as in csrc/torch/attention.h. Keys and values of a slot are [g, length, d]. Position p
// lies at place p, and with a window or chunks of W positions at place p % W, where it takes that of p - W. A token is
// written and attends before the next one is written, since that takes the place of a key that it sees. The softmax is
// computed in base 2.
#include "rows.h"

using namespace mz;

namespace {

struct Sizes { int64_t s, b, groups, repeats, d, length, window, chunk; };

// The keys of a query at `position`: `count` of them from `place` on, and back at place 0 after place `ring` - 1.
struct Seen { int64_t place, count, ring; };

Seen seen_from(int64_t position, const Sizes& z) {
  if (z.window && position >= z.window) return {(position + 1) % z.window, z.window, z.window};
  return {0, (z.chunk ? position % z.chunk : position) + 1, std::numeric_limits<int64_t>::max()};
}

// body(j, place): number and place of every key that is seen, the earliest first.
template <typename Body> MZ_INLINE void each_key(const Seen& seen, const Body& body) {
  int64_t straight = std::min(seen.count, seen.ring - seen.place);
  for (int64_t j = 0; j < straight; ++j) body(j, seen.place + j);
  for (int64_t j = straight; j < seen.count; ++j) body(j, j - straight);
}

template <typename T> MZ_INLINE float dot(const T* x, const T* y, int64_t d) {
  F total{};
  each_part<T>(d, [&](int64_t i, auto at) MZ_LAMBDA {
    total = fold([](F a, F b) MZ_LAMBDA { return a + b; }, total, at.load(x + i) * at.load(y + i));
  });
  return sum(total);
}

// total += factor x, both of length d. total is in T's order of lanes.
template <typename T> MZ_INLINE void add(float* total, const T* x, float factor, int64_t d) {
  each_part<T>(d, [&](int64_t i, auto at) MZ_LAMBDA { at.put_sums(total + i, at.sums(total + i) + at.load(x + i) * factor); });
}

struct Weighing { float factor, slope, cap; };  // all in base 2; cap 0: no cap

// scores = cap tanh(score / cap) + bias, in base 2.
MZ_INLINE void bound(int64_t count, float* scores, const Weighing& by) {
  each_vector(count, [&](int64_t j, int64_t n) MZ_LAMBDA {
    F distance = to_float(lane()) + (float)(j - count + 1);
    store(scores + j, hyperbolic_tangent(load(scores + j, n) * (1.0f / by.cap)) * by.cap + distance * by.slope, n);
  });
}

// One query against the keys that it sees: out = sum of weights times values. `scores` has room for their number.
template <typename T>
void attend(const Seen& seen, int64_t d, const T* query, const T* keys, const T* values, const Weighing& by, float* scores, float* total,
            T* out) {
  int64_t count = seen.count;
  float slope = by.cap ? 0.0f : by.slope;  // the bias comes after the cap
  float most = -std::numeric_limits<float>::infinity();
  each_key(seen, [&](int64_t j, int64_t place) MZ_LAMBDA {
    scores[j] = dot(query, keys + place * d, d) * by.factor + slope * (float)(j - count + 1);
  });
  if (by.cap) bound(count, scores, by);
  for (int64_t j = 0; j < count; ++j) most = scores[j] > most ? scores[j] : most;
  if (most == -std::numeric_limits<float>::infinity()) most = 0.0f;
  F sums{};
  each_vector(count, [&](int64_t j, int64_t n) MZ_LAMBDA {
    F weight = first_lanes(exp2<float>(load(scores + j, n) - most), n, 0.0f);
    store(scores + j, weight, n);
    sums += weight;
  });
  float share = 1.0f / sum(sums);
  std::fill_n(total, d, 0.0f);
  each_key(seen, [&](int64_t j, int64_t place) MZ_LAMBDA { add(total, values + place * d, scores[j], d); });
  each_part<T>(d, [&](int64_t i, auto at) MZ_LAMBDA { at.store(out + i, at.sums(total + i) * share); });
}

template <typename T>
void attention(int64_t threads, const Sizes& z, const T* mixed, T* keys, T* values, const int64_t* slots, const int64_t* positions,
               const float* slopes, float scale, float cap, T* out) {
  int64_t ring = z.window + z.chunk ? z.window + z.chunk : z.length;  // at most one of the two is set
  int64_t group = (z.repeats + 2) * z.d, planes = z.b * z.groups;
  parallel_for(planes, grain(z.s * z.length * z.d), (int)threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(z.length + LANES), total(z.d + 2 * LANES);
    for (int64_t plane = begin; plane < end; ++plane) {
      int64_t row = plane / z.groups, g = plane % z.groups, first = positions[row];
      int64_t at = (slots[row] * z.groups + g) * z.length * z.d;
      for (int64_t i = 0; i < z.s; ++i) {
        int64_t place = (first + i) % ring;
        const T* heads = mixed + (i * planes + plane) * group;
        memcpy((void*)(keys + at + place * z.d), heads + z.repeats * z.d, z.d * sizeof(T));
        memcpy((void*)(values + at + place * z.d), heads + (z.repeats + 1) * z.d, z.d * sizeof(T));
        for (int64_t r = 0; r < z.repeats; ++r)
          attend(seen_from(first + i, z), z.d, heads + r * z.d, keys + at, values + at,
                 {scale * LOG2_E, slopes ? slopes[g * z.repeats + r] * LOG2_E : 0.0f, cap * LOG2_E}, scores.data(), total.data(),
                 out + ((i * planes + plane) * z.repeats + r) * z.d);
      }
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void cached_attention_##SUFFIX(int64_t threads, const T* mixed, T* keys, T* values, const int64_t* slots,            \
                                        const int64_t* positions, const float* slopes, T* out, int64_t s, int64_t b,          \
                                        int64_t groups, int64_t repeats, int64_t d, int64_t length, float scale,              \
                                        int64_t window, int64_t chunk, float cap) {                                           \
    attention(threads, {s, b, groups, repeats, d, length, window, chunk}, mixed, keys, values, slots, positions, slopes,      \
              scale, cap, out);                                                                                               \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
