// Causal softmax of scaled scores with ALiBi and document boundaries, in place, and its gradient in place of the
// probabilities.
//
// Memory is read once and written once: rows of up to 8,192 keys stay in registers. As on the CPU, the bias is relative
// to the query's own position, slope * (key - own), so that scores of near keys do not lose digits at large positions.
// Probabilities beyond the keys that a query sees are zero, and so are the gradients of their scores: backward does not
// write them.
#include "rows.h"

using namespace mz;

namespace {

struct Shape { int64_t batch, heads, queries, keys; };

// The keys that one row sees: those before `seen`, of its own document only. scale and slope include the factor log2 e.
struct Sight {
  int64_t seen;
  float scale, slope;
  const int64_t* documents;
  int64_t own;

  MZ_DEVICE float score(float x, int64_t key) const {
    bool hidden = (key >= seen) | (documents && documents[key] != own);  // a pack lies in the row: any of its keys may be read
    return hidden ? -INFINITY : x * scale + (float)(key - seen + 1) * slope;
  }
};

template <typename T, typename Tiles>
__global__ void MZ_BOUNDS(Tiles::THREADS)
    forward(T* scores, Shape s, float scale, const float* slopes, const int64_t* documents) {
  constexpr int W = Tiles::W;
  int64_t row = Tiles::row();
  if (row >= s.batch * s.heads * s.queries) return;
  int64_t plane = row / s.queries, seen = s.keys - s.queries + row % s.queries + 1;
  const int64_t* numbers = documents ? documents + plane / s.heads * s.keys : nullptr;
  float slope = slopes ? slopes[plane % s.heads] : 0.0f;
  Sight sight{seen, scale * LOG2_E, slope * LOG2_E, numbers, numbers ? numbers[seen - 1] : 0};
  T* x = scores + row * s.keys;
  Part<T, Tiles> part(x, seen);

  float top = -INFINITY;  // fmaxf ignores a NaN, but it makes the total NaN, and so the row
  each_pack<Tiles>(seen, [&](int64_t i, int p) {
    Floats<W> value = part.at(i, p);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      value[j] = sight.score(value[j], i + j);
      top = fmaxf(top, value[j]);
    }
    if constexpr (Tiles::KEEPS) part.kept[p] = value;
  });
  top = over_group<Tiles::GROUP>(top, Largest());

  auto exponential = [&](int64_t i, int p) {
    Floats<W> value = part.at(i, p);
#pragma unroll
    for (int j = 0; j < W; ++j) value[j] = power_of_two((Tiles::KEEPS ? value[j] : sight.score(value[j], i + j)) - top);
    return value;
  };
  float total = 0.0f;
  each_pack<Tiles>(seen, [&](int64_t i, int p) {
    Floats<W> value = exponential(i, p);
#pragma unroll
    for (int j = 0; j < W; ++j) total += value[j];
    if constexpr (Tiles::KEEPS) part.kept[p] = value;
  });
  float factor = 1.0f / over_group<Tiles::GROUP>(total, Sum());

  each_pack<Tiles>(s.keys, [&](int64_t i, int p) {
    Floats<W> value = all_of<W>(0.0f);
    if (i < seen) {
      Floats<W> exponentials = Tiles::KEEPS ? part.at(i, p) : exponential(i, p);
#pragma unroll
      for (int j = 0; j < W; ++j) value[j] = i + j < seen ? exponentials[j] * factor : 0.0f;
    }
    store<W>(x + i, value);
  });
}

template <typename T, typename Tiles>
__global__ void MZ_BOUNDS(Tiles::THREADS) backward(T* probs, const T* grad, Shape s, float scale) {
  constexpr int W = Tiles::W;
  int64_t row = Tiles::row();
  if (row >= s.batch * s.heads * s.queries) return;
  int64_t seen = s.keys - s.queries + row % s.queries + 1;
  T* p = probs + row * s.keys;
  Part<T, Tiles> own(p, seen), in(grad + row * s.keys, seen);
  float total = 0.0f;
  each_pack<Tiles>(seen, [&](int64_t i, int number) {
    Floats<W> a = own.at(i, number), b = in.at(i, number);
#pragma unroll
    for (int j = 0; j < W; ++j)
      if (i + j < seen) total += a[j] * b[j];
  });
  total = over_group<Tiles::GROUP>(total, Sum());
  each_pack<Tiles>(seen, [&](int64_t i, int number) {
    Floats<W> a = own.at(i, number), b = in.at(i, number), value;
#pragma unroll
    for (int j = 0; j < W; ++j) value[j] = i + j < seen ? a[j] * (b[j] - total) * scale : 0.0f;
    store<W>(p + i, value);
  });
}

template <typename T, typename Body> int each_row(const Shape& s, bool wide, const Body& body) {
  int64_t rows = s.batch * s.heads * s.queries;
  if (!rows) return cudaSuccess;
  return with_tiling<T>(s.keys, wide && s.keys % WIDEST<T> == 0, [&](auto tiles) {
    typedef decltype(tiles) Tiles;
    return body(tiles, dim3((unsigned)parts_of(rows, Tiles::ROWS)));
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                     \
  MZ_API int softmax_##SUFFIX(Launch* to, int64_t batch, int64_t heads, int64_t queries, int64_t keys, T* scores,                \
                              const float* slopes, const int64_t* documents, float scale) {                                     \
    Shape s{batch, heads, queries, keys};                                                                                        \
    return each_row<T>(s, aligned<WIDEST<T>>(scores), [&](auto tiles, dim3 blocks) {                                        \
      return launch(*to, forward<T, decltype(tiles)>, blocks, tiles.threads(), scores, s, scale, slopes, documents);             \
    });                                                                                                                          \
  }                                                                                                                              \
  MZ_API int softmax_backward_##SUFFIX(Launch* to, int64_t batch, int64_t heads, int64_t queries, int64_t keys, T* probs,        \
                                       const T* grad, float scale) {                                                             \
    Shape s{batch, heads, queries, keys};                                                                                        \
    return each_row<T>(s, aligned<WIDEST<T>>(probs, grad), [&](auto tiles, dim3 blocks) {                                   \
      return launch(*to, backward<T, decltype(tiles)>, blocks, tiles.threads(), probs, grad, s, scale);                          \
    });                                                                                                                          \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
