// The two passes of a cross-entropy over rows of logits: statistics, and the gradient written over the logits.
//
// target: column of the label, -1 where another rank holds it. Columns from `real` on are padding.
#include "rows.h"

using namespace mz;

namespace {

constexpr int64_t CHUNK = 2048;  // stays in the first cache between the search for its maximum and its exponentials
constexpr float LOWEST = -std::numeric_limits<float>::max();

struct Statistics { float largest; double exponentials, logits; };

// The search for the largest value ignores NaN; NaN makes the sums NaN.
template <bool SUMMED, typename T> MZ_INLINE void add_chunk(Statistics& row, const T* x, int64_t count) {
  F top = splat(-INFINITY), logits = F{}, exponentials = F{};
  each_part<T>(count, [&](int64_t i, auto at) MZ_LAMBDA {
    auto values = at.load(x + i);
    if (SUMMED) logits = fold(plus, logits, values);
    top = fold(larger, top, at.or_else(values, -INFINITY));
  });
  float largest = std::max(row.largest, max(top));
  float base = std::max(largest, LOWEST);  // finite also if all values so far are -inf
  each_part<T>(count, [&](int64_t i, auto at) MZ_LAMBDA {
    auto terms = lift([&](F x) MZ_LAMBDA { return exp2<float>((x - base) * LOG2_E); }, at.load(x + i));
    exponentials = fold(plus, exponentials, at.or_else(terms, 0.0f));
  });
  row.exponentials = row.exponentials * std::exp((double)row.largest - base) + sum(exponentials);
  row.largest = largest;
  if (SUMMED) row.logits += sum(logits);
}

// results: largest [rows], then sum of exponentials of the distance to it, logit of the label (0 without one), sum of
// logits.
template <bool SUMMED, typename T>
void statistics(int64_t threads, int64_t rows, int64_t stride, int64_t real, const T* logits, const int64_t* target, float* largest,
                float* sums) {
  parallel_for(rows, grain(real), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* x = logits + r * stride;
      Statistics row{-INFINITY, 0.0, 0.0};
      for (int64_t at = 0; at < real; at += CHUNK) add_chunk<SUMMED>(row, x + at, std::min(CHUNK, real - at));
      largest[r] = row.largest;
      sums[r] = (float)row.exponentials;
      sums[rows + r] = target[r] < 0 ? 0.0f : get(x + target[r]);
      if (SUMMED) sums[2 * rows + r] = (float)row.logits;
    }
  });
}

// exp(x - log_normaliser) weight - smooth, plus `hit` at the label; 0 in padding columns.
template <typename T>
void gradient(int64_t threads, int64_t rows, int64_t columns, int64_t stride, int64_t real, T* logits, const int64_t* target,
              const float* log_normaliser, const float* weight, const float* smooth, const float* hit) {
  parallel_for(rows, grain(columns), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* x = logits + r * stride;
      float shift = log_normaliser[r], factor = weight[r], less = smooth ? smooth[r] : 0.0f;
      // The label's gradient is computed in full precision, since `hit` near -1 cancels a probability near 1.
      float own = target[r] < 0 ? 0.0f : exp2<float>(splat((get(x + target[r]) - shift) * LOG2_E))[0] * factor - less + hit[r];
      map(real, x, [&](F x) MZ_LAMBDA { return exp2<T>((x - shift) * LOG2_E) * factor - less; }, x);
      if (target[r] >= 0) put(x + target[r], own);
      memset((void*)(x + real), 0, (columns - real) * sizeof(T));
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void row_statistics_##SUFFIX(int64_t threads, int64_t rows, int64_t stride, int64_t real, const T* logits,           \
                                      const int64_t* target, float* largest, float* sums, int64_t summed) {                   \
    (summed ? statistics<true, T> : statistics<false, T>)(threads, rows, stride, real, logits, target, largest, sums);        \
  }                                                                                                                           \
  MZ_API void write_gradient_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, int64_t stride, int64_t real,           \
                                      T* logits, const int64_t* target, const float* log_normaliser, const float* weight,     \
                                      const float* smooth, const float* hit) {                                                \
    gradient(threads, rows, columns, stride, real, logits, target, log_normaliser, weight, smooth, hit);                      \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
