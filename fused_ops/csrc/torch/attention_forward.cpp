// Causal attention, forward: blocks of queries against blocks of keys, with an online softmax (Milakov and Gimelshein
// 2018, arXiv:1805.02867; in blocks: Dao et al. 2022, arXiv:2205.14135). At any time one tile of scores per thread
// exists.
#include "attention.h"

using namespace mz;

namespace {

constexpr int64_t QUERIES = 64, KEYS = 512;

template <typename M> struct Scratch {
  Buffer<M> tile, keys, values, queries, weights;
  Buffer<float> scores, context, most, total;
};

// One pass over a block of queries.
template <typename T, typename M> struct Block {
  const Attention& a;
  const int32_t* begin;   // of the sample's positions
  int64_t first, rows;    // queries of this block
  float slope;
  const M *queries, *keys, *values;
  M* weights;
  float *scores, *context, *most, *total;

  // Scores of query i over keys [k0 + low, k0 + high), in `row`, n long -> its weights, 0 elsewhere; most, total and
  // context follow.
  template <bool CAPPED> void weigh(int64_t i, int64_t k0, int64_t low, int64_t high, int64_t n, float* row, M* out) const {
    int64_t start = round_down(low, LANES), stop = round_up(high, LANES);
    if (low >= high) start = stop = n;
    F distance = positions() + (float)(k0 + start - first - i), largest = splat(-std::numeric_limits<float>::infinity());
    const Score<CAPPED> score(a);
    for (int64_t j = start; j < stop; j += LANES, distance += (float)LANES) {
      F x = score.of(score.bounded(load(row + j))) + distance * slope;
      if (j < low || j + LANES > high) x = within(x, j, low, high, -std::numeric_limits<float>::infinity());
      store(row + j, x);
      largest = larger(largest, x);
    }
    float before = most[i], now = std::max(before, max(largest));
    float from = now == -std::numeric_limits<float>::infinity() ? 0.0f : now;  // nothing finite so far: weights are 0, not NaN
    F sum_ = F{};
    for (int64_t j = 0; j < start; j += LANES) store(out + j, F{});
    for (int64_t j = start; j < stop; j += LANES) {
      F weight = exp2<M>(load(row + j) - from);
      sum_ += weight;
      store(out + j, weight);
    }
    for (int64_t j = stop; j < n; j += LANES) store(out + j, F{});
    if (now != before) {
      float shrink = get_exp2(before - from);
      total[i] *= shrink;
      for (int64_t j = 0; j < a.wide(); j += LANES) store(context + i * a.wide() + j, load(context + i * a.wide() + j) * shrink);
    }
    most[i] = now;
    total[i] += sum(sum_);
  }
  static float get_exp2(float x) { return exp2<float>(splat(x))[0]; }

  // Keys from k0 on, as far as this block's queries see them.
  void against(int64_t k0) const {
    int64_t low = round_down(std::max<int64_t>(0, begin[first] - k0), EDGE);
    int64_t high = round_up(std::min(KEYS, first + rows - k0), EDGE), n = high - low, wide = a.wide();
    product(QUERIES, n, wide, queries, wide, keys + low * pair<M>, KEYS, scores, n, false);
    for (int64_t i = 0; i < rows; ++i) {
      int64_t from = std::max<int64_t>(0, begin[first + i] - k0 - low), to = std::min(n, first + i + 1 - k0 - low);
      if (a.cap) weigh<true>(i, k0 + low, from, to, n, scores + i * n, weights + i * n);
      else weigh<false>(i, k0 + low, from, to, n, scores + i * n, weights + i * n);
    }
    product(QUERIES, wide, n, weights, n, values + low * wide, wide, context, wide, true);
  }
};

// Keys and values of positions [from, to) of a plane as right operands, a block of KEYS after the other.
template <typename T, typename M>
void pack(const Attention& a, const T* mixed, int64_t plane, int64_t from, int64_t to, Scratch<M>& mine) {
  int64_t wide = a.wide(), all = round_up(to, KEYS);
  M *keys = mine.keys.of(all * wide), *values = mine.values.of(all * wide), *tile = mine.tile.of(KEYS * wide);
  for (int64_t k0 = round_down(from, KEYS); k0 < to; k0 += KEYS) {
    int64_t rows = std::min(KEYS, a.s - k0);
    gather(rows, a.d, mixed + a.slot(plane, a.repeats) + k0 * a.stride(), a.stride(), tile, KEYS, wide);
    to_right_transposed(wide, KEYS, tile, keys + k0 * wide);
    gather(rows, a.d, mixed + a.slot(plane, a.repeats + 1) + k0 * a.stride(), a.stride(), tile, KEYS, wide);
    to_right(KEYS, wide, tile, values + k0 * wide);
  }
}

// Query blocks [first, last) of a plane, all its heads.
template <typename T, typename M>
void attend(const Attention& a, const Sight& sight, const T* mixed, T* out, float* norms, int64_t plane, int64_t first, int64_t last) {
  static thread_local Scratch<M> mine;
  const int32_t* begin = sight.begin(plane / a.groups);
  int64_t wide = a.wide(), stop = std::min(last * QUERIES, a.s);
  pack(a, mixed, plane, begin[first * QUERIES], stop, mine);
  M *queries = mine.queries.of(QUERIES * wide), *weights = mine.weights.of(QUERIES * KEYS);
  float *scores = mine.scores.of(QUERIES * KEYS), *context = mine.context.of(QUERIES * wide);
  float *most = mine.most.of(QUERIES), *total = mine.total.of(QUERIES);
  for (int64_t r = 0; r < a.repeats; ++r)
    for (int64_t q0 = first * QUERIES; q0 < stop; q0 += QUERIES) {
      int64_t rows = std::min(QUERIES, a.s - q0);
      gather(rows, a.d, mixed + a.slot(plane, r) + q0 * a.stride(), a.stride(), queries, QUERIES, wide);
      std::fill_n(most, QUERIES, -std::numeric_limits<float>::infinity());
      std::fill_n(total, QUERIES, 0.0f), std::fill_n(context, QUERIES * wide, 0.0f);
      for (int64_t k0 = round_down(begin[q0], KEYS); k0 < q0 + rows; k0 += KEYS)
        Block<T, M>{a, begin, q0, rows, a.slope(plane, r), queries, mine.keys.of(0) + k0 * wide, mine.values.of(0) + k0 * wide,
                    weights, scores, context, most, total}.against(k0);
      for (int64_t i = 0; i < rows; ++i) {
        T* row = out + (q0 + i) * a.out_stride() + a.out_slot(plane, r);
        float share = 1.0f / total[i];
        for (int64_t j = 0; j < a.d; j += LANES) store(row + j, load(context + i * wide + j) * share, a.d - j);
        norms[a.row_of(plane, r) + q0 + i] = most[i] + std::log2(total[i]);
      }
    }
  block_gemm_done<M>();
}

// Planes are shared among the threads; where they are too few for that, parts of planes, the longest first.
template <typename T, typename M> void forward(int threads, const Attention& a, const T* mixed, T* out, float* norms) {
  Sight sight(a);
  int64_t blocks = (a.s + QUERIES - 1) / QUERIES, parts = a.planes() >= 4 * threads ? 1 : (4 * threads + a.planes() - 1) / a.planes();
  parts = threads == 1 ? 1 : std::min(parts, blocks);
  parallel_each(parts * a.planes(), threads, [&](int64_t task) {
    int64_t part = parts - 1 - task / a.planes();
    attend<T, M>(a, sight, mixed, out, norms, task % a.planes(), blocks * part / parts, blocks * (part + 1) / parts);
  });
}

}  // namespace

// mixed [s, b, g, r + 2, d] -> out [s, b, g r, d] and norms [b, g r, s], log2 of the sum of each query's 2^score.
#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void attention_forward_##SUFFIX(int64_t threads, const T* mixed, T* out, float* norms, const float* slopes,          \
                                         const int64_t* documents, int64_t s, int64_t b, int64_t groups, int64_t repeats,     \
                                         int64_t d, float scale, int64_t window, int64_t chunk, float cap) {                  \
    Attention a{s, b, groups, repeats, d, scale, slopes, documents, window, chunk, cap};                                      \
    with_operands<T>([&](auto m) { forward<T, decltype(m)>((int)threads, a, mixed, out, norms); }); \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
