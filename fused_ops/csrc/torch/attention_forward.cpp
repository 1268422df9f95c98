// Causal attention, forward: blocks of queries against blocks of keys, with an online softmax (Milakov and Gimelshein
// 2018, arXiv:1805.02867; in blocks: Dao et al. 2022, arXiv:2205.14135). At any time one tile of scores per thread
// exists.
#include "attention.h"

using namespace mz;

namespace {

constexpr int64_t QUERIES = 64, KEYS = 512;

// How queries and keys are divided. The keys of a window are others for each query, so a block of fewer queries computes
// less in vain. They are packed for a stretch of queries at a time, into the places of keys that no query sees any more.
struct Tiling {
  int64_t queries = QUERIES;  // of a block
  int64_t edge = EDGE;        // keys of a block begin and end at its multiples
  int64_t most = KEYS;        // keys of a tile
  int64_t stretch, ring;      // queries whose keys are packed together; places of packed keys

  explicit Tiling(const Attention& a) : stretch(round_up(a.s, KEYS)), ring(stretch) {
    if (!a.window) return;
    queries = a.window > 256 ? 32 : 16, edge = LANES;
    most = 2 * KEYS + 64;  // a window of 2 KEYS and its edges
    stretch = KEYS, ring = std::min(ring, KEYS + round_up(a.window, KEYS));
  }
  // The end of a tile that begins at key k. Without a window tiles end at multiples of KEYS.
  int64_t after(int64_t k, int64_t last) const { return std::min(last, most == KEYS ? round_down(k, KEYS) + KEYS : k + most); }
};

template <typename M> struct Scratch {
  Buffer<M> tile, keys, values, queries, weights;
  Buffer<float> scores, context, most, total;
};

// One pass over a block of queries.
template <typename T, typename M> struct Block {
  const Attention& a;
  const Tiling& tiling;
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

  // Keys [k0, k0 + n).
  void against(int64_t k0, int64_t n) const {
    int64_t wide = a.wide(), height = tiling.queries, ring = tiling.ring;
    each_piece(k0, k0 + n, KEYS, [&](int64_t from, int64_t to) {
      const M* piece = keys + round_down(from % ring, KEYS) * wide + from % KEYS * pair<M>;
      product(height, to - from, wide, queries, wide, piece, KEYS, scores + from - k0, n, false);
    });
    for (int64_t i = 0; i < rows; ++i) {
      int64_t low = std::max<int64_t>(0, begin[first + i] - k0), high = std::min(n, first + i + 1 - k0);
      if (a.cap) weigh<true>(i, k0, low, high, n, scores + i * n, weights + i * n);
      else weigh<false>(i, k0, low, high, n, scores + i * n, weights + i * n);
    }
    each_piece(k0, k0 + n, ring, [&](int64_t from, int64_t to) {
      product(height, wide, to - from, weights + from - k0, n, values + from % ring * wide, wide, context, wide, true);
    });
  }
};

// Keys and values of positions [from, to) of a plane as right operands, a block of KEYS after the other.
template <typename T, typename M>
void pack(const Attention& a, const Tiling& tiling, const T* mixed, int64_t plane, int64_t from, int64_t to, Scratch<M>& mine) {
  int64_t wide = a.wide(), all = tiling.ring * wide;
  M *keys = mine.keys.of(all), *values = mine.values.of(all), *tile = mine.tile.of(KEYS * wide);
  for (int64_t k0 = from; k0 < to; k0 += KEYS) {
    int64_t rows = std::min(KEYS, a.s - k0), place = k0 % tiling.ring * wide;
    gather(rows, a.d, mixed + a.slot(plane, a.repeats) + k0 * a.stride(), a.stride(), tile, KEYS, wide);
    to_right_transposed(wide, KEYS, tile, keys + place);
    gather(rows, a.d, mixed + a.slot(plane, a.repeats + 1) + k0 * a.stride(), a.stride(), tile, KEYS, wide);
    to_right(KEYS, wide, tile, values + place);
  }
}

// Queries [from, to) of a head. Their keys are packed.
template <typename T, typename M>
void attend(const Attention& a, const Tiling& tiling, const int32_t* begin, const T* mixed, T* out, float* norms, int64_t plane, int64_t r,
            int64_t from, int64_t to, Scratch<M>& mine) {
  int64_t wide = a.wide(), height = tiling.queries;
  M *queries = mine.queries.of(height * wide), *weights = mine.weights.of(height * tiling.most);
  float *scores = mine.scores.of(height * tiling.most), *context = mine.context.of(height * wide);
  float *most = mine.most.of(height), *total = mine.total.of(height);
  for (int64_t q0 = from; q0 < to; q0 += height) {
    int64_t rows = std::min(height, a.s - q0), last = round_up(q0 + rows, tiling.edge);
    gather(rows, a.d, mixed + a.slot(plane, r) + q0 * a.stride(), a.stride(), queries, height, wide);
    for (int64_t i = 0; i < rows; ++i) prefetch<WRITE>(out + (q0 + i) * a.out_stride() + a.out_slot(plane, r), a.d);
    std::fill_n(most, height, -std::numeric_limits<float>::infinity());
    std::fill_n(total, height, 0.0f), std::fill_n(context, height * wide, 0.0f);
    const Block<T, M> block{a, tiling, begin, q0, rows, a.slope(plane, r), queries, mine.keys.of(0), mine.values.of(0), weights, scores, context, most, total};
    for (int64_t k0 = round_down(begin[q0], tiling.edge), next; k0 < last; k0 = next) next = tiling.after(k0, last), block.against(k0, next - k0);
    for (int64_t i = 0; i < rows; ++i) {
      T* row = out + (q0 + i) * a.out_stride() + a.out_slot(plane, r);
      float share = 1.0f / total[i];
      for (int64_t j = 0; j < a.d; j += LANES) store(row + j, load(context + i * wide + j) * share, a.d - j);
      norms[a.row_of(plane, r) + q0 + i] = most[i] + std::log2(total[i]);
    }
  }
}

// Queries [first, last) of a plane, all its heads. first is a multiple of tiling.queries.
template <typename T, typename M>
void attend_all(const Attention& a, const Tiling& tiling, const Sight& sight, const T* mixed, T* out, float* norms, int64_t plane, int64_t first, int64_t last) {
  static thread_local Scratch<M> mine;
  const int32_t* begin = sight.begin(plane / a.groups);
  int64_t packed = 0;
  each_piece(first, last, tiling.stretch, [&](int64_t from, int64_t to) {
    packed = std::max(packed, round_down(begin[from], KEYS));
    pack(a, tiling, mixed, plane, packed, to, mine);
    packed = round_up(to, KEYS);
    for (int64_t r = 0; r < a.repeats; ++r) attend(a, tiling, begin, mixed, out, norms, plane, r, from, to, mine);
  });
  block_gemm_done<M>();
}

// Planes are shared among the threads; where they are too few for that, parts of planes, the longest first.
template <typename T, typename M> void forward(int threads, const Attention& a, const T* mixed, T* out, float* norms) {
  Sight sight(a);
  Tiling tiling(a);
  int64_t height = tiling.queries, blocks = (a.s + height - 1) / height;
  int64_t parts = a.planes() >= 4 * threads ? 1 : (4 * threads + a.planes() - 1) / a.planes();
  parts = threads == 1 ? 1 : std::min(parts, blocks);
  parallel_each(parts * a.planes(), threads, [&](int64_t task) {
    int64_t part = parts - 1 - task / a.planes(), first = blocks * part / parts * height, last = std::min(a.s, blocks * (part + 1) / parts * height);
    attend_all<T, M>(a, tiling, sight, mixed, out, norms, task % a.planes(), first, last);
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
