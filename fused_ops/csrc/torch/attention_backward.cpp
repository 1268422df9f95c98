// Causal attention, backward. The weights are computed again from the saved norms, tile by tile (Dao et al. 2022,
// arXiv:2205.14135). The rows of a tile are keys. So the weights and their gradient are left operands of the products
// for values and keys without a transposition, and right operands of the product for queries, whose gradient is
// therefore kept transposed. Values of a query are along the lanes.
#include "attention.h"

using namespace mz;

namespace {

constexpr int64_t QUERIES = 256, KEYS = 128;

// Keys that are taken at once. A window ends at another query for each of them, so with half as many less is computed
// in vain; for long rows of queries 128 are faster.
MZ_INLINE int64_t key_block(const Attention& a) { return a.window ? KEYS / 2 : KEYS; }


// The operands of a head's or plane's rows. rows: the left operand; across: the right operand [d, positions]; down:
// [positions, d].
template <typename M> struct Scratch {
  Buffer<M> tile, keys, values, keys_across, queries_across, queries_down, grads_across, grads_down, weights, changes, paired;
  Buffer<float> norms, totals, scores, products, d_keys, d_values, d_queries, turned;
};

template <typename T> struct Tensors {
  const T *mixed, *out, *grad;
  const float* norms;
  T* d_mixed;
};

// A part of a plane: keys and queries from .. to, both multiples of their blocks (or the end of the sequence).
struct Part { int64_t plane, key_from, key_to, query_from, query_to; bool for_keys, for_queries; };

template <typename T, typename M> struct Backward {
  const Attention& a;
  const Sight& sight;
  const Tensors<T>& x;
  const Part& part;
  Scratch<M>& mine;
  const int64_t wide = a.wide(), block = key_block(a);

  void run() const {
    int64_t keys = round_up(part.key_to, block) * wide;
    pack_keys();
    if (part.for_keys) std::fill_n(mine.d_keys.of(keys), keys, 0.0f), std::fill_n(mine.d_values.of(keys), keys, 0.0f);
    for (int64_t r = 0; r < a.repeats; ++r) head(r);
    if (part.for_keys) {
      write(mine.d_keys.of(keys), a.repeats, a.scale);
      write(mine.d_values.of(keys), a.repeats + 1, 1.0f);
    }
    block_gemm_done<M>();
  }

  void head(int64_t r) const {
    pack_queries(r);
    int64_t queries = round_up(part.query_to, QUERIES) * wide;
    if (part.for_queries) std::fill_n(mine.d_queries.of(queries), queries, 0.0f);
    const int32_t* end = sight.end(part.plane / a.groups);
    for (int64_t k0 = part.key_from; k0 < part.key_to; k0 += block) {
      int64_t last = std::min<int64_t>(part.query_to, end[std::min(k0 + block, a.s) - 1]);
      for (int64_t q0 = std::max(part.query_from, round_down(k0, QUERIES)); q0 < last; q0 += QUERIES) against(r, k0, q0, last);
    }
    if (part.for_queries) write_queries(r);
  }

  // Keys k0.. and those of queries q0.. that see them.
  void against(int64_t r, int64_t k0, int64_t q0, int64_t last) const {
    int64_t low = std::max<int64_t>(0, round_down(k0 - q0, EDGE)), high = std::min(QUERIES, round_up(last - q0, EDGE)), n = high - low;
    int64_t across = q0 * wide + low * pair<M>, down = (q0 + low) * wide;
    float *scores = mine.scores.of(block * QUERIES), *products = mine.products.of(block * QUERIES);
    M *weights = mine.weights.of(block * QUERIES), *changes = mine.changes.of(block * QUERIES), *paired = mine.paired.of(block * QUERIES);
    product(block, n, wide, mine.keys.of(0) + k0 * wide, wide, mine.queries_across.of(0) + across, QUERIES, scores, n, false);
    product(block, n, wide, mine.values.of(0) + k0 * wide, wide, mine.grads_across.of(0) + across, QUERIES, products, n, false);
    const int32_t* end = sight.end(part.plane / a.groups);
    for (int64_t i = 0; i < block; ++i) {
      bool real = k0 + i < a.s;
      int64_t from = std::max<int64_t>(0, k0 + i - q0 - low), to = real ? std::min<int64_t>(n, end[k0 + i] - q0 - low) : 0;
      const Row row{k0 + i - q0 - low, from, to, n, q0 + low, scores + i * n, products + i * n, weights + i * n, changes + i * n};
      if (a.cap) weigh<true>(a.slope(part.plane, r), row);
      else weigh<false>(a.slope(part.plane, r), row);
      if (i % 2 && part.for_queries) to_right(2, n, changes + (i - 1) * n, paired + (i - 1) * n);
    }
    if (part.for_keys) {
      product(block, wide, n, weights, n, mine.grads_down.of(0) + down, wide, mine.d_values.of(0) + k0 * wide, wide, true);
      product(block, wide, n, changes, n, mine.queries_down.of(0) + down, wide, mine.d_keys.of(0) + k0 * wide, wide, true);
    }
    if (part.for_queries)
      product(wide, n, block, mine.keys_across.of(0) + k0 * wide, block, paired, n, mine.d_queries.of(0) + q0 * wide + low, QUERIES, true);
  }

  // One key and n queries from number `query` on, of which [low, high) see it. distance: from the first query to the
  // key. products: of the value and the incoming gradients.
  struct Row {
    int64_t distance, low, high, n, query;
    const float *scores, *products;
    M *weights, *changes;
  };

  // Scores and products of a row -> weights and the gradient of the products with the key.
  template <bool CAPPED> void weigh(float slope, const Row& row) const {
    const auto [distance, low, high, n, query, scores, products, weights, changes] = row;
    int64_t start = round_down(low, LANES), stop = round_up(high, LANES);
    if (low >= high) start = stop = n;
    const float *norms = mine.norms.of(0) + query, *totals = mine.totals.of(0) + query;
    const Score<CAPPED> score(a);
    F away = splat((float)(distance - start)) - positions();
    for (int64_t j = 0; j < start; j += LANES) store(weights + j, F{}), store(changes + j, F{});
    for (int64_t j = start; j < stop; j += LANES, away -= (float)LANES) {
      F bounded = score.bounded(load(scores + j)), weight = exp2<M>(score.of(bounded) + away * slope - load(norms + j));
      F change = score.through(weight * (load(products + j) - load(totals + j)), bounded);
      if (j < low || j + LANES > high) weight = within(weight, j, low, high, 0.0f), change = within(change, j, low, high, 0.0f);
      store(weights + j, weight), store(changes + j, change);
    }
    for (int64_t j = stop; j < n; j += LANES) store(weights + j, F{}), store(changes + j, F{});
  }

  void pack_keys() const {
    int64_t all = round_up(part.key_to, block) * wide;
    M *keys = mine.keys.of(all), *values = mine.values.of(all), *across = mine.keys_across.of(all);
    const T* from = x.mixed + a.slot(part.plane, a.repeats);
    for (int64_t k0 = part.key_from; k0 < part.key_to; k0 += block) {
      int64_t rows = std::min(block, a.s - k0);
      gather(rows, a.d, from + k0 * a.stride(), a.stride(), keys + k0 * wide, block, wide);
      gather(rows, a.d, from + a.d + k0 * a.stride(), a.stride(), values + k0 * wide, block, wide);
      if (part.for_queries) to_left_transposed(wide, block, keys + k0 * wide, across + k0 * wide);
    }
  }

  void pack_queries(int64_t r) const {
    int64_t all = round_up(part.query_to, QUERIES);
    M *tile = mine.tile.of(QUERIES * wide);
    M *across = mine.queries_across.of(all * wide), *down = mine.queries_down.of(all * wide);
    M *grads_across = mine.grads_across.of(all * wide), *grads_down = mine.grads_down.of(all * wide);
    float *norms = mine.norms.of(all), *totals = mine.totals.of(all);
    for (int64_t q0 = part.query_from; q0 < part.query_to; q0 += QUERIES) {
      int64_t rows = std::min(QUERIES, a.s - q0), there = q0 * a.out_stride() + a.out_slot(part.plane, r);
      gather(rows, a.d, x.mixed + a.slot(part.plane, r) + q0 * a.stride(), a.stride(), tile, QUERIES, wide);
      to_right_transposed(wide, QUERIES, tile, across + q0 * wide);
      if (part.for_keys) to_right(QUERIES, wide, tile, down + q0 * wide);
      gather(rows, a.d, x.grad + there, a.out_stride(), tile, QUERIES, wide);
      to_right_transposed(wide, QUERIES, tile, grads_across + q0 * wide);
      if (part.for_keys) to_right(QUERIES, wide, tile, grads_down + q0 * wide);
      for (int64_t i = 0; i < rows; ++i) {
        norms[q0 + i] = x.norms[a.row_of(part.plane, r) + q0 + i];
        totals[q0 + i] = dot(a.d, x.out + there + i * a.out_stride(), x.grad + there + i * a.out_stride());
      }
    }
  }

  static float dot(int64_t n, const T* left, const T* right) {
    F all = F{};
    for (int64_t j = 0; j < n; j += LANES) all += load(left + j, n - j) * load(right + j, n - j);
    return sum(all);
  }

  // Rows [key_from, key_to) of a sum to a slot of the gradient.
  void write(const float* sums, int64_t slot, float factor) const {
    for (int64_t i = part.key_from; i < part.key_to; ++i) {
      T* row = x.d_mixed + a.slot(part.plane, slot) + i * a.stride();
      for (int64_t j = 0; j < a.d; j += LANES) store(row + j, load(sums + i * wide + j) * factor, a.d - j);
    }
  }

  void write_queries(int64_t r) const {
    float* turned = mine.turned.of(QUERIES * wide);
    for (int64_t q0 = part.query_from; q0 < part.query_to; q0 += QUERIES) {
      to_left_transposed(QUERIES, wide, mine.d_queries.of(0) + q0 * wide, turned);
      for (int64_t i = 0; i < std::min(QUERIES, a.s - q0); ++i) {
        T* row = x.d_mixed + a.slot(part.plane, r) + (q0 + i) * a.stride();
        for (int64_t j = 0; j < a.d; j += LANES) store(row + j, load(turned + i * wide + j) * a.scale, a.d - j);
      }
    }
  }
};

template <typename T, typename M> void run(const Attention& a, const Sight& sight, const Tensors<T>& x, const Part& part) {
  static thread_local Scratch<M> mine;
  Backward<T, M>{a, sight, x, part, mine}.run();
}

// A thread takes a whole plane, all five products of a tile. Where planes would leave threads idle for longer than two
// more products take, parts of planes instead, once for their keys and once for their queries: the same sums in the
// same order.
template <typename T, typename M> void backward(int threads, const Attention& a, const Tensors<T>& x) {
  Sight sight(a);
  int64_t planes = a.planes(), rounds = (planes + threads - 1) / threads;
  if (rounds * threads * 5 <= planes * 7)
    return parallel_each(planes, threads, [&](int64_t plane) { run<T, M>(a, sight, x, {plane, 0, a.s, 0, a.s, true, true}); });
  int64_t parts = (4 * threads + planes - 1) / planes;
  int64_t keys = round_up((a.s + parts - 1) / parts, KEYS), queries = round_up((a.s + parts - 1) / parts, QUERIES);
  parallel_each(parts * planes * 2, threads, [&](int64_t task) {
    int64_t plane = task / 2 % planes, part = task / 2 / planes, from = part * keys, last = (parts - 1 - part) * queries;
    if (task % 2 == 0 && from < a.s) {
      int64_t stop = std::min(a.s, from + keys), seeing = std::min(a.s, round_up(sight.end(plane / a.groups)[stop - 1], QUERIES));
      run<T, M>(a, sight, x, {plane, from, stop, round_down(from, QUERIES), seeing, true, false});
    }
    if (task % 2 == 1 && last < a.s) {
      int64_t stop = std::min(a.s, last + queries), seen = round_down(sight.begin(plane / a.groups)[last], KEYS);
      run<T, M>(a, sight, x, {plane, seen, stop, last, stop, false, true});
    }
  });
}

}  // namespace

// grad [s, b, g r, d], with mixed, out and norms of the forward pass -> d_mixed [s, b, g, r + 2, d].
#define MZ_KERNEL(SUFFIX, T)                                                                                                 \
  MZ_API void attention_backward_##SUFFIX(int64_t threads, const T* mixed, const T* out, const T* grad, const float* norms,  \
                                          T* d_mixed, const float* slopes, const int64_t* documents, int64_t s, int64_t b,   \
                                          int64_t groups, int64_t repeats, int64_t d, float scale, int64_t window,           \
                                          int64_t chunk, float cap) {                                                        \
    Attention a{s, b, groups, repeats, d, scale, slopes, documents, window, chunk, cap};                                     \
    Tensors<T> x{mixed, out, grad, norms, d_mixed};                                                                          \
    with_operands<T>([&](auto m) { backward<T, decltype(m)>((int)threads, a, x); });                           \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
