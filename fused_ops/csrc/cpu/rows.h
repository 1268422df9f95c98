// Loops over a row in vectors, and sums over rows whose order does not depend on the number of threads.
#pragma once

#include "functions.h"
#include "kernel.h"

#define MZ_LAMBDA __attribute__((always_inline))

namespace mz {

// body(i, lanes) for i = 0, 16, ...: `lanes` is the constant 16 but for a last, partial vector.
template <typename Body> MZ_INLINE void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) body(i, int64_t(LANES));
  if (i < n) body(i, n - i);
}

// f of vectors, and of two vectors at once.
template <typename Function, typename... Rest> MZ_INLINE F lift(const Function& f, F x, Rest... rest) { return f(x, rest...); }
template <typename Function, typename... Rest> MZ_INLINE Two lift(const Function& f, Two x, Rest... rest) {
  return {f(x.first, rest.first...), f(x.second, rest.second...)};
}

// f(... f(f(first, x), y) ...) of the vectors that x consists of.
template <typename Function> MZ_INLINE F fold(const Function& f, F first, F x) { return f(first, x); }
template <typename Function> MZ_INLINE F fold(const Function& f, F first, Two x) { return f(f(first, x.first), x.second); }

// Elements of a row that are taken at once: 2 LANES of them, or `lanes` <= LANES. All of a loop's tensors are of one
// storage type T; `or_else` replaces lanes that hold none. Float sums that it keeps lie in T's order of lanes until
// `in_memory_order` puts them right.
template <typename T> struct Both {
  MZ_MEMBER Two load(const T* p) const { return load_two(p); }
  MZ_MEMBER void store(T* p, Two x) const { store_two(p, x); }
  MZ_MEMBER Two or_else(Two x, float) const { return x; }
  MZ_MEMBER Two sums(const float* p) const { return {mz::load(p), mz::load(p + LANES)}; }
  MZ_MEMBER void put_sums(float* p, Two x) const { mz::store(p, x.first), mz::store(p + LANES, x.second); }
};
template <typename T> struct Some {
  int64_t lanes;
  MZ_MEMBER F load(const T* p) const { return mz::load(p, lanes); }
  MZ_MEMBER void store(T* p, F x) const { mz::store(p, x, lanes); }
  MZ_MEMBER F or_else(F x, float other) const { return first_lanes(x, lanes, other); }
  MZ_MEMBER F sums(const float* p) const { return mz::load(p, lanes); }
  MZ_MEMBER void put_sums(float* p, F x) const { mz::store(p, x, lanes); }
};

// body(i, at): the elements from i on that `at` takes.
template <typename T, typename Body> MZ_INLINE void each_part(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) body(i, Both<T>{});
  for (; i < n; i += LANES) body(i, Some<T>{std::min<int64_t>(LANES, n - i)});
}

// y = f(x...), element by element.
template <typename T, typename Function, typename... Inputs> MZ_INLINE void map(int64_t n, T* y, const Function& f, const Inputs*... x) {
  each_part<T>(n, [&](int64_t i, auto at) MZ_LAMBDA { at.store(y + i, lift(f, at.load(x + i)...)); });
}

template <typename T> void in_memory_order(int64_t n, float* sums) {
  if (!std::is_same<T, bf16>::value) return;
  for (int64_t i = 0; i + 2 * LANES <= n; i += 2 * LANES) {
    Two x = in_order<T>({load(sums + i), load(sums + i + LANES)});
    store(sums + i, x.first), store(sums + i + LANES, x.second);
  }
}

// Rows of one block: at most 64 blocks, of at least 32 rows.
MZ_INLINE int64_t block_rows(int64_t rows) { return std::max<int64_t>(32, (rows + 63) / 64); }

// Fewest rows for a thread, since waking a thread does not pay for small tensors.
MZ_INLINE int64_t grain(int64_t columns) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(columns, 1)); }

// Calls body(first row, last row + 1, sums) for each fixed block of rows; `sums` are `arrays` times `columns` zeros of
// that block alone, which the body adds to with `each_part<T>`. Then adds up the blocks' sums in order into `result`.
template <typename T, typename Body>
void sum_over_rows(int64_t threads, int64_t rows, int64_t columns, int64_t arrays, float* result, const Body& body) {
  int64_t size = block_rows(rows), blocks = (rows + size - 1) / size, all = arrays * columns;
  std::vector<float> partial(blocks * all);
  parallel_for(blocks, 1, (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) body(b * size, std::min(rows, (b + 1) * size), partial.data() + b * all);
  });
  parallel_for(all, 4096, (int)threads, [&](int64_t begin, int64_t end) {
    each_vector(end - begin, [&](int64_t i, int64_t n) MZ_LAMBDA {
      F total = splat(0.0f);
      for (int64_t b = 0; b < blocks; ++b) total += load(partial.data() + b * all + begin + i, n);
      store(result + begin + i, total, n);
    });
  });
  for (int64_t array = 0; array < arrays; ++array) in_memory_order<T>(columns, result + array * columns);
}

// sums += term(row, i, at) over rows, ROWS of them at once, so that a sum is loaded and stored once for them. This pays
// if a term is just a load. Longer terms hide the memory traffic, and rows that map to the same cache lines slow them
// down.
template <typename T, int ROWS, typename Term>
MZ_INLINE void add_rows(int64_t begin, int64_t end, int64_t columns, float* sums, const Term& term) {
  for (int64_t row = begin; row < end; row += ROWS)
    each_part<T>(columns, [&](int64_t i, auto at) MZ_LAMBDA {
      auto total = at.sums(sums + i);
      for (int64_t r = row; r < std::min(row + ROWS, end); ++r) total = total + term(r, i, at);
      at.put_sums(sums + i, total);
    });
}

}  // namespace mz
