// Causal softmax of scaled scores with ALiBi and document boundaries, in place, and its gradient in place of the
// probabilities.
//
// Memory is read once and written once: rows of up to 8,192 keys stay in registers. As on the CPU, the bias is relative
// to the query's own position, slope * (key - own), so that scores of near keys do not lose digits at large positions.
// Probabilities beyond the keys that a query sees are zero, and so are the gradients of their scores: backward does not
// write them.
#include "division.h"
#include "rows.h"

using namespace mz;

namespace {

struct Shape {
  int64_t rows, keys, queries;
  Divisor by_queries, by_heads;
  Shape(int64_t batch, int64_t heads, int64_t queries, int64_t keys)
      : rows(batch * heads * queries), keys(keys), queries(queries), by_queries(queries), by_heads(heads) {}
};

// What one row makes of its scores. scale and slope include the factor log2 e.
template <typename T, bool DOCUMENTS, typename Index> struct Query {
  T* row;
  Index seen;  // the keys before it are seen, with DOCUMENTS those of the own document only
  float scale, slope;
  const int64_t* documents;
  int64_t own;

  MZ_DEVICE Query(T* scores, const Shape& s, int64_t row, float scale, const float* slopes, const int64_t* numbers)
      : row(scores + row * s.keys), scale(scale * LOG2_E), slope(0.0f), documents(nullptr), own(0) {
    int64_t plane = s.by_queries(row), batch = s.by_heads(plane);
    seen = (Index)(s.keys - s.queries + row - plane * s.queries + 1);
    if (slopes) slope = slopes[plane - batch * s.by_heads.by] * LOG2_E;
    if constexpr (DOCUMENTS) documents = numbers + batch * s.keys, own = documents[seen - 1];
  }
  // The scores of the keys from `key` on, which are W packed in a word; adds of small whole numbers are exact.
  template <int W> MZ_DEVICE Floats<W> scores(Floats<W> x, Index key) const {
    float distance = (float)(key - seen + 1);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      x[j] = x[j] * scale + (distance + (float)j) * slope;
      if constexpr (DOCUMENTS) x[j] = documents[key + j] == own ? x[j] : -INFINITY;
    }
    return x;
  }
};

// Whole packs of seen keys are shared as in rows.h. The fewer than W keys behind them are taken one by one, by the
// first threads: `rest` belongs to the key packed + threadIdx.x.
template <typename T, typename Tiles, bool DOCUMENTS>
__global__ void MZ_BOUNDS(Tiles::THREADS)
    forward(T* scores, Shape s, float scale, const float* slopes, const int64_t* documents) {
  constexpr int W = Tiles::W;
  typedef typename Tiles::Index Index;
  if (Tiles::row() >= s.rows) return;
  const Query<T, DOCUMENTS, Index> query(scores, s, Tiles::row(), scale, slopes, documents);
  T* x = query.row;
  Index packed = query.seen - query.seen % W, own = packed + (Index)threadIdx.x;
  Part<T, Tiles> part(x, packed);
  float rest = own < query.seen ? query.template scores<1>(load<1>(x + own), own)[0] : -INFINITY;

  float top = rest;  // fmaxf ignores a NaN, but it makes the total NaN, and so the row
  each_pack<Tiles>(packed, [&](Index i, int p) {
    Floats<W> value = query.scores(part.at(i, p), i);
#pragma unroll
    for (int j = 0; j < W; ++j) top = fmaxf(top, value[j]);
    if constexpr (Tiles::KEEPS) part.kept[p] = value;
  });
  top = over_group<Tiles::GROUP>(top, Largest());

  auto exponential = [&](Index i, int p) {
    Floats<W> value = part.at(i, p);
    if constexpr (!Tiles::KEEPS) value = query.scores(value, i);
    return map([&](float score) { return power_of_two(score - top); }, value);
  };
  rest = power_of_two(rest - top);
  float total = rest;
  each_pack<Tiles>(packed, [&](Index i, int p) {
    Floats<W> value = exponential(i, p);
#pragma unroll
    for (int j = 0; j < W; ++j) total += value[j];
    if constexpr (Tiles::KEEPS) part.kept[p] = value;
  });
  float factor = 1.0f / over_group<Tiles::GROUP>(total, Sum());

  each_pack<Tiles>((Index)s.keys, [&](Index i, int p) {
    Floats<W> value = all_of<W>(0.0f);
    if (i < packed) value = map([&](float e) { return e * factor; }, Tiles::KEEPS ? part.at(i, p) : exponential(i, p));
    if (W == 1 || i != packed) store<W>(x + i, value);
  });
  if (W > 1 && threadIdx.x < W && own < (Index)s.keys) store<1>(x + own, all_of<1>(own < query.seen ? rest * factor : 0.0f));
}

template <typename T, typename Tiles>
__global__ void MZ_BOUNDS(Tiles::THREADS) backward(T* probs, const T* grad, Shape s, float scale) {
  constexpr int W = Tiles::W;
  int64_t row = Tiles::row();
  if (row >= s.rows) return;
  int64_t seen = s.keys - s.queries + row - s.by_queries(row) * s.queries + 1;
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

template <typename T, int MOST, typename Body> int each_row(const Shape& s, bool wide, const Body& body) {
  if (!s.rows) return cudaSuccess;
  return with_tiling<T, MOST>(s.keys, wide && s.keys % WIDEST<T> == 0, [&](auto tiles) {
    typedef decltype(tiles) Tiles;
    return body(tiles, dim3((unsigned)parts_of(s.rows, Tiles::ROWS)));
  });
}

// A warp of a row of 2,048 scores of 16 bits: reductions over four warps would take more instructions than the scores.
template <typename T> constexpr int MOST = sizeof(T) == 2 ? 64 : 16;

template <typename T, bool DOCUMENTS>
int softmax(const Launch& to, const Shape& s, T* scores, const float* slopes, const int64_t* documents, float scale) {
  return each_row<T, MOST<T>>(s, aligned<WIDEST<T>>(scores), [&](auto tiles, dim3 blocks) {
    return launch(to, forward<T, decltype(tiles), DOCUMENTS>, blocks, tiles.threads(), scores, s, scale, slopes, documents);
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                         \
  MZ_API int softmax_##SUFFIX(Launch* to, int64_t batch, int64_t heads, int64_t queries, int64_t keys, T* scores,    \
                              const float* slopes, const int64_t* documents, float scale) {                          \
    Shape s(batch, heads, queries, keys);                                                                            \
    if (documents) return softmax<T, true>(*to, s, scores, slopes, documents, scale);                                \
    return softmax<T, false>(*to, s, scores, slopes, documents, scale);                                              \
  }                                                                                                                  \
  MZ_API int softmax_backward_##SUFFIX(Launch* to, int64_t batch, int64_t heads, int64_t queries, int64_t keys,      \
                                       T* probs, const T* grad, float scale) {                                       \
    Shape s(batch, heads, queries, keys);                                                                            \
    return each_row<T, 16>(s, aligned<WIDEST<T>>(probs, grad), [&](auto tiles, dim3 blocks) {                        \
      return launch(*to, backward<T, decltype(tiles)>, blocks, tiles.threads(), probs, grad, s, scale);              \
    });                                                                                                              \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
