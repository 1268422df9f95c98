// Attention of a few new tokens to the cached keys and values of all tokens before them.
//
// b rows of s new tokens. Row i continues slot slots[i] of the cache at position positions[i]. The projection of the
// new tokens is [s, b, g, r + 2, d] as in csrc/torch/attention.h. Keys and values of a slot are [g, length, d]. The
// softmax is computed in base 2.
#include "rows.h"

using namespace mz;

namespace {

struct Sizes { int64_t s, b, groups, repeats, d, length; };

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

// One query against keys [0, count): out = sum of weights times values. `scores` has room for count.
template <typename T>
void attend(int64_t count, int64_t d, const T* query, const T* keys, const T* values, float factor, float slope, float* scores,
            float* total, T* out) {
  float most = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < count; ++j) scores[j] = dot(query, keys + j * d, d) * factor + slope * (float)(j - count + 1);
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
  for (int64_t j = 0; j < count; ++j) add(total, values + j * d, scores[j], d);
  each_part<T>(d, [&](int64_t i, auto at) MZ_LAMBDA { at.store(out + i, at.sums(total + i) * share); });
}

template <typename T>
void attention(int64_t threads, const Sizes& z, const T* mixed, T* keys, T* values, const int64_t* slots, const int64_t* positions,
               const float* slopes, float scale, T* out) {
  int64_t group = (z.repeats + 2) * z.d, planes = z.b * z.groups;
  parallel_for(planes, grain(z.s * z.length * z.d), (int)threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(z.length + LANES), total(z.d + 2 * LANES);
    for (int64_t plane = begin; plane < end; ++plane) {
      int64_t row = plane / z.groups, g = plane % z.groups, first = positions[row];
      int64_t at = (slots[row] * z.groups + g) * z.length * z.d;
      for (int64_t i = 0; i < z.s; ++i) {
        const T* heads = mixed + (i * planes + plane) * group;
        memcpy((void*)(keys + at + (first + i) * z.d), heads + z.repeats * z.d, z.d * sizeof(T));
        memcpy((void*)(values + at + (first + i) * z.d), heads + (z.repeats + 1) * z.d, z.d * sizeof(T));
        for (int64_t r = 0; r < z.repeats; ++r)
          attend(first + i + 1, z.d, heads + r * z.d, keys + at, values + at, scale * LOG2_E,
                 slopes ? slopes[g * z.repeats + r] * LOG2_E : 0.0f, scores.data(), total.data(),
                 out + ((i * planes + plane) * z.repeats + r) * z.d);
      }
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void cached_attention_##SUFFIX(int64_t threads, const T* mixed, T* keys, T* values, const int64_t* slots,            \
                                        const int64_t* positions, const float* slopes, T* out, int64_t s, int64_t b,          \
                                        int64_t groups, int64_t repeats, int64_t d, int64_t length, float scale) {            \
    attention(threads, {s, b, groups, repeats, d, length}, mixed, keys, values, slots, positions, slopes, scale, out);        \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
