// Causal attention, backward. The weights are computed again from the saved norms, tile by tile (Dao et al. 2022,
// arXiv:2205.14135). The rows of a tile are keys. So the weights and their gradient are left operands of the products
// for values and keys without a transposition, and right operands of the product for queries, whose gradient is
// therefore kept transposed. Values of a query are along the lanes.
#include "attention.h"

using namespace mz;

namespace {

constexpr int64_t QUERIES = 256, KEYS = 128;

// How keys and queries are divided. The queries of a window are others for each key, so a block of fewer keys computes
// less in vain. Keys are taken in stretches of QUERIES. What a stretch needs of the queries is packed before it, into the
// places of queries that see no later key: their gradients are complete.
struct Tiling {
  int64_t keys = KEYS;      // of a block
  int64_t most = QUERIES;   // queries of a tile
  int64_t heads = 1;        // that keep their packed queries side by side
  int64_t stretch, ring;    // keys that are packed together; places of packed queries

  explicit Tiling(const Attention& a) : stretch(round_up(a.s, QUERIES)), ring(stretch) {
    if (!a.window) return;
    keys = 32, most = 2 * QUERIES + 64, heads = a.repeats;  // a window of 2 QUERIES and its edges
    stretch = QUERIES, ring = std::min(ring, QUERIES + round_up(a.window, QUERIES));
  }
  // The end of a tile that begins at query q. Without a window tiles end at multiples of QUERIES.
  int64_t after(int64_t q, int64_t last) const { return std::min(last, most == QUERIES ? round_down(q, QUERIES) + QUERIES : q + most); }
  int64_t first_place(int64_t r) const { return heads == 1 ? 0 : r * ring; }
};

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

struct Range { int64_t from, to; };  // of positions

template <typename T, typename M> struct Backward {
  const Attention& a;
  const Sight& sight;
  const Tensors<T>& x;
  const Part& part;
  Scratch<M>& mine;
  const Tiling tiling{a};
  const int64_t wide = a.wide(), block = tiling.keys, ring = tiling.ring;
  const int32_t* const end = sight.end(part.plane / a.groups);

  void run() const {
    each_piece(part.key_from, part.key_to, tiling.stretch, [&](int64_t from, int64_t to) { stretch({from, to}); });
    block_gemm_done<M>();
  }

  void stretch(const Range& keys) const {
    int64_t all = round_up(keys.to - keys.from, block) * wide;
    pack_keys(keys);
    if (part.for_keys) std::fill_n(mine.d_keys.of(all), all, 0.0f), std::fill_n(mine.d_values.of(all), all, 0.0f);
    for (int64_t r = 0; r < a.repeats; ++r) head(r, keys);
    if (part.for_keys) {
      write(keys, mine.d_keys.of(all), a.repeats, a.scale);
      write(keys, mine.d_values.of(all), a.repeats + 1, 1.0f);
    }
  }

  void head(int64_t r, const Range& keys) const {
    pack_queries(r, {keys.from == part.key_from ? part.query_from : needed_until(keys.from), needed_until(keys.to)});
    for (int64_t k0 = keys.from; k0 < keys.to; k0 += block) {
      int64_t last = std::min<int64_t>(part.query_to, end[std::min(k0 + block, a.s) - 1]), seen = round_up(last, EDGE);
      for (int64_t q0 = std::max(part.query_from, k0), next; q0 < last; q0 = next) {
        next = tiling.after(q0, seen);
        against(r, keys.from, k0, q0, next - q0);
      }
    }
    if (part.for_queries) write_queries(r, {among_queries(keys.from), among_queries(keys.to)});
  }

  int64_t among_queries(int64_t position) const { return std::max(part.query_from, std::min(part.query_to, position)); }

  // The end of the queries that keys before k need.
  int64_t needed_until(int64_t k) const { return among_queries(round_up(end[k - 1], QUERIES)); }

  // Keys k0.. of those that are packed from k_first on, and queries [q0, q0 + n).
  void against(int64_t r, int64_t k_first, int64_t k0, int64_t q0, int64_t n) const {
    int64_t tile = block * tiling.most, k = (k0 - k_first) * wide, head = tiling.first_place(r);
    float *scores = mine.scores.of(tile), *products = mine.products.of(tile);
    M *weights = mine.weights.of(tile), *changes = mine.changes.of(tile), *paired = mine.paired.of(tile);
    each_piece(q0, q0 + n, QUERIES, [&](int64_t from, int64_t to) {
      int64_t across = (head + round_down(from % ring, QUERIES)) * wide + from % QUERIES * pair<M>;
      product(block, to - from, wide, mine.keys.of(0) + k, wide, mine.queries_across.of(0) + across, QUERIES, scores + from - q0, n, false);
      product(block, to - from, wide, mine.values.of(0) + k, wide, mine.grads_across.of(0) + across, QUERIES, products + from - q0, n, false);
    });
    for (int64_t i = 0; i < block; ++i) {
      bool real = k0 + i < a.s;
      int64_t low = std::max<int64_t>(0, k0 + i - q0), high = real ? std::min<int64_t>(n, end[k0 + i] - q0) : 0;
      const Row row{k0 + i - q0, low, high, n, number(r, q0), scores + i * n, products + i * n, weights + i * n, changes + i * n};
      if (a.cap) weigh<true>(a.slope(part.plane, r), row);
      else weigh<false>(a.slope(part.plane, r), row);
      if (i % 2 && part.for_queries) to_right(2, n, changes + (i - 1) * n, paired + (i - 1) * n);
    }
    if (part.for_keys)
      each_piece(q0, q0 + n, ring, [&](int64_t from, int64_t to) {
        int64_t down = (head + from % ring) * wide;
        product(block, wide, to - from, weights + from - q0, n, mine.grads_down.of(0) + down, wide, mine.d_values.of(0) + k, wide, true);
        product(block, wide, to - from, changes + from - q0, n, mine.queries_down.of(0) + down, wide, mine.d_keys.of(0) + k, wide, true);
      });
    if (part.for_queries)
      each_piece(q0, q0 + n, QUERIES, [&](int64_t from, int64_t to) {
        float* sums = mine.d_queries.of(0) + (head + round_down(from % ring, QUERIES)) * wide + from % QUERIES;
        product(wide, to - from, block, mine.keys_across.of(0) + k, block, paired + (from - q0) * pair<M>, n, sums, QUERIES, true);
      });
  }

  // Of a query of a head among those whose norms are kept.
  int64_t number(int64_t r, int64_t q) const { return (tiling.heads == 1 ? 0 : r * round_up(a.s, QUERIES)) + q; }

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

  void pack_keys(const Range& range) const {
    int64_t all = round_up(range.to - range.from, block) * wide;
    M *keys = mine.keys.of(all), *values = mine.values.of(all), *across = mine.keys_across.of(all);
    for (int64_t k0 = range.from; k0 < range.to; k0 += block) {
      int64_t rows = std::min(block, a.s - k0), to = (k0 - range.from) * wide;
      const T* from = x.mixed + a.slot(part.plane, a.repeats) + k0 * a.stride();
      gather(rows, a.d, from, a.stride(), keys + to, block, wide);
      gather(rows, a.d, from + a.d, a.stride(), values + to, block, wide);
      if (part.for_queries) to_left_transposed(wide, block, keys + to, across + to);
    }
  }

  // Sums of their gradients begin at 0.
  void pack_queries(int64_t r, const Range& range) const {
    int64_t all = tiling.heads * ring * wide, numbers = tiling.heads * round_up(a.s, QUERIES);
    M *tile = mine.tile.of(QUERIES * wide), *across = mine.queries_across.of(all), *down = mine.queries_down.of(all);
    M *grads_across = mine.grads_across.of(all), *grads_down = mine.grads_down.of(all);
    float *norms = mine.norms.of(numbers) + number(r, 0), *totals = mine.totals.of(numbers) + number(r, 0), *sums = mine.d_queries.of(all);
    for (int64_t q0 = range.from; q0 < range.to; q0 += QUERIES) {
      int64_t rows = std::min(QUERIES, a.s - q0), from = q0 * a.out_stride() + a.out_slot(part.plane, r);
      int64_t to = (tiling.first_place(r) + q0 % ring) * wide;
      gather(rows, a.d, x.mixed + a.slot(part.plane, r) + q0 * a.stride(), a.stride(), tile, QUERIES, wide);
      to_right_transposed(wide, QUERIES, tile, across + to);
      if (part.for_keys) to_right(QUERIES, wide, tile, down + to);
      gather(rows, a.d, x.grad + from, a.out_stride(), tile, QUERIES, wide);
      to_right_transposed(wide, QUERIES, tile, grads_across + to);
      if (part.for_keys) to_right(QUERIES, wide, tile, grads_down + to);
      for (int64_t i = 0; i < rows; ++i) {
        prefetch(x.out + from + (i + AHEAD) * a.out_stride(), a.d);
        norms[q0 + i] = x.norms[a.row_of(part.plane, r) + q0 + i];
        totals[q0 + i] = dot(a.d, x.out + from + i * a.out_stride(), x.grad + from + i * a.out_stride());
      }
      if (part.for_queries) std::fill_n(sums + to, QUERIES * wide, 0.0f);
    }
  }

  static float dot(int64_t n, const T* left, const T* right) {
    F all = F{};
    for (int64_t j = 0; j < n; j += LANES) all += load(left + j, n - j) * load(right + j, n - j);
    return sum(all);
  }

  // Sums of the packed keys to a slot of the gradient.
  void write(const Range& keys, const float* sums, int64_t slot, float factor) const {
    for (int64_t i = keys.from; i < keys.to; ++i, sums += wide) {
      T* row = x.d_mixed + a.slot(part.plane, slot) + i * a.stride();
      prefetch<WRITE>(row + AHEAD * a.stride(), a.d);
      for (int64_t j = 0; j < a.d; j += LANES) store(row + j, load(sums + j) * factor, a.d - j);
    }
  }

  void write_queries(int64_t r, const Range& range) const {
    float* turned = mine.turned.of(QUERIES * wide);
    for (int64_t q0 = range.from; q0 < range.to; q0 += QUERIES) {
      to_left_transposed(QUERIES, wide, mine.d_queries.of(0) + (tiling.first_place(r) + q0 % ring) * wide, turned);
      for (int64_t i = 0; i < std::min(QUERIES, a.s - q0); ++i) {
        T* row = x.d_mixed + a.slot(part.plane, r) + (q0 + i) * a.stride();
        prefetch<WRITE>(row + AHEAD * a.stride(), a.d);
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
