// RMSNorm of every query head and every key head of a mixed projection, and back. A bundle is a key-value head of a
// position: `repeats` query heads, a key head, and a value head, which is copied.
#include "norm_rows.h"

using namespace mz;

namespace {

template <typename T> struct Heads {
  int64_t bundles, repeats, d;
  const T *query, *key;
  float query_offset, key_offset;

  const T* weight(int64_t head) const { return head < repeats ? query : key; }
  float offset(int64_t head) const { return head < repeats ? query_offset : key_offset; }
  int64_t at(int64_t bundle, int64_t head) const { return (bundle * (repeats + 2) + head) * d; }
};

// scale: 1 / sqrt(mean of the squares + eps) of each normalised head.
template <typename T> void forward(int64_t threads, const Heads<T>& k, T* y, const T* x, float* scale, float eps) {
  parallel_for(k.bundles, grain((k.repeats + 2) * k.d), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t bundle = begin; bundle < end; ++bundle) {
      for (int64_t head = 0; head <= k.repeats; ++head) {
        float* factor = scale + bundle * (k.repeats + 1) + head;
        int64_t at = k.at(bundle, head);
        normalise_row<false>(k.d, y + at, x + at, k.weight(head), (const T*)nullptr, k.offset(head), eps, nullptr, factor);
      }
      int64_t value = k.at(bundle, k.repeats + 1);
      memcpy((void*)(y + value), x + value, k.d * sizeof(T));
    }
  });
}

// sums: the gradient of the queries' weight, then that of the keys'.
template <typename T> void backward(int64_t threads, const Heads<T>& k, T* dx, float* sums, const T* grad, const T* x, const float* scale) {
  sum_over_rows<T>(threads, k.bundles, k.d, 2, sums, [&](int64_t begin, int64_t end, float* own) {
    for (int64_t bundle = begin; bundle < end; ++bundle) {
      for (int64_t head = 0; head <= k.repeats; ++head) {
        float factor = scale[bundle * (k.repeats + 1) + head];
        int64_t at = k.at(bundle, head);
        normalise_row_backward<false>(k.d, dx + at, own + (head < k.repeats ? 0 : k.d), grad + at, (const T*)nullptr, x + at,
                                      k.weight(head), k.offset(head), 0.0f, factor);
      }
      int64_t value = k.at(bundle, k.repeats + 1);
      memcpy((void*)(dx + value), grad + value, k.d * sizeof(T));
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void norm_heads_##SUFFIX(int64_t threads, int64_t bundles, int64_t repeats, int64_t d, T* y, const T* x,             \
                                  const T* query, const T* key, float* scale, float eps, float query_offset,                  \
                                  float key_offset) {                                                                         \
    forward<T>(threads, {bundles, repeats, d, query, key, query_offset, key_offset}, y, x, scale, eps);                       \
  }                                                                                                                           \
  MZ_API void norm_heads_backward_##SUFFIX(int64_t threads, int64_t bundles, int64_t repeats, int64_t d, T* dx, float* sums,  \
                                           const T* grad, const T* x, const T* query, const T* key, const float* scale,       \
                                           float query_offset, float key_offset) {                                            \
    backward<T>(threads, {bundles, repeats, d, query, key, query_offset, key_offset}, dx, sums, grad, x, scale);              \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
