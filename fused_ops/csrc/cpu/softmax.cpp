// Causal softmax of scaled scores with ALiBi and document boundaries, in place, and its gradient in place of the
// probabilities.
//
// A row's values are kept in a scratch array of floats in the cache, so memory is read once and written once. The bias
// is relative to the query's own position, slope * (key - own). The softmax is the same, and the scores of near keys,
// which matter most, do not lose digits at large positions.
#include "rows.h"

using namespace mz;

namespace {

constexpr int64_t ROWS = 16;  // rows that one thread takes at a time

struct Shape { int64_t batch, heads, queries, keys; };

// Vectors over the `seen` keys, whole wherever the row of `keys` has room for it.
template <typename Body> MZ_INLINE void each_seen(int64_t seen, int64_t keys, const Body& body) {
  int64_t i = 0;
  for (; i < seen && i + LANES <= keys; i += LANES) body(i, int64_t(LANES));
  if (i < seen) body(i, keys - i);
}

MZ_INLINE F hide_others(F value, const int64_t* documents, int64_t own, int64_t n) {
  float same[LANES] = {};
  for (int64_t j = 0; j < n; ++j) same[j] = documents[j] == own ? 1.0f : 0.0f;
  return choose(load(same) != 0.0f, value, splat(-INFINITY));
}

// scale and slope are those of the scores times log2 e.
template <typename T>
MZ_INLINE void forward_row(T* x, float* scratch, int64_t seen, int64_t keys, float scale, float slope, const int64_t* documents) {
  F top = splat(-INFINITY), distance = to_float(lane()) - (float)(seen - 1);
  each_seen(seen, keys, [&](int64_t i, int64_t n) MZ_LAMBDA {
    F value = load(x + i, n) * scale + (distance + (float)i) * slope;
    if (documents) value = hide_others(value, documents + i, documents[seen - 1], n);
    value = first_lanes(value, seen - i, -INFINITY);
    store(scratch + i, value);
    top = larger(top, value);  // a NaN makes the total NaN, and with it the row
  });
  float largest = max(top);
  F total = splat(0.0f);
  each_seen(seen, keys, [&](int64_t i, int64_t) MZ_LAMBDA {
    F value = exp2<T>(load(scratch + i) - largest);
    store(scratch + i, value);
    total += value;
  });
  float factor = 1.0f / sum(total);
  each_seen(seen, keys, [&](int64_t i, int64_t n) MZ_LAMBDA { store(x + i, first_lanes(load(scratch + i) * factor, seen - i, 0.0f), n); });
  int64_t written = std::min(keys, (seen + LANES - 1) / LANES * LANES);
  memset((void*)(x + written), 0, (keys - written) * sizeof(T));
}

template <typename T> MZ_INLINE void backward_row(T* p, const T* grad, int64_t seen, int64_t keys, float scale) {
  F weighted = splat(0.0f);
  each_part<T>(seen, [&](int64_t i, auto at) MZ_LAMBDA { weighted = fold(plus, weighted, at.load(p + i) * at.load(grad + i)); });
  float total = sum(weighted);
  map(seen, p, [&](F value, F grad) MZ_LAMBDA { return value * (grad - total) * scale; }, p, grad);
  memset((void*)(p + seen), 0, (keys - seen) * sizeof(T));
}

// body(plane, row, keys that the row sees) for every row, blocks of rows to whichever thread is free.
template <typename Body> void each_row(int64_t threads, const Shape& s, const Body& body) {
  int64_t blocks = (s.queries + ROWS - 1) / ROWS;
  parallel_each(s.batch * s.heads * blocks, (int)threads, [&](int64_t item) {
    int64_t plane = item / blocks, first = item % blocks * ROWS;
    body(plane, first, std::min(first + ROWS, s.queries));
  });
}

template <typename T>
void forward(int64_t threads, const Shape& s, T* scores, float scale, const float* slopes, const int64_t* documents) {
  each_row(threads, s, [&](int64_t plane, int64_t first, int64_t last) {
    std::vector<float> scratch(s.keys + LANES);
    float slope = slopes ? slopes[plane % s.heads] : 0.0f;
    const int64_t* own = documents ? documents + plane / s.heads * s.keys : nullptr;
    for (int64_t row = first; row < last; ++row)
      forward_row(scores + (plane * s.queries + row) * s.keys, scratch.data(), s.keys - s.queries + row + 1, s.keys, scale * LOG2_E, slope * LOG2_E, own);
  });
}

template <typename T> void backward(int64_t threads, const Shape& s, T* probs, const T* grad, float scale) {
  each_row(threads, s, [&](int64_t plane, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      int64_t at = (plane * s.queries + row) * s.keys;
      backward_row(probs + at, grad + at, s.keys - s.queries + row + 1, s.keys, scale);
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void softmax_##SUFFIX(int64_t threads, int64_t batch, int64_t heads, int64_t queries, int64_t keys, T* scores,       \
                               const float* slopes, const int64_t* documents, float scale) {                                  \
    forward(threads, {batch, heads, queries, keys}, scores, scale, slopes, documents);                                        \
  }                                                                                                                           \
  MZ_API void softmax_backward_##SUFFIX(int64_t threads, int64_t batch, int64_t heads, int64_t queries, int64_t keys,         \
                                        T* probs, const T* grad, float scale) {                                               \
    backward(threads, {batch, heads, queries, keys}, probs, grad, scale);                                                     \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
