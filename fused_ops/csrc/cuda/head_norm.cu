// RMSNorm of every query head and every key head of a mixed projection, and back. A bundle is a key-value head of a
// position: `repeats` query heads, a key head, and a value head, which is copied. A warp has a head in its registers.
#include "columns.h"
#include "division.h"
#include "rows.h"

using namespace mz;

namespace {

constexpr int64_t WARPS = 2048;  // that go through bundles together, with the sums of weight gradients in their registers

template <typename T> struct Heads {
  int64_t bundles, repeats;
  int d;
  const T *x, *query, *key;
  float query_offset, key_offset;

  MZ_DEVICE const T* weight(int64_t head) const { return head < repeats ? query : key; }
  MZ_DEVICE float offset(int64_t head) const { return head < repeats ? query_offset : key_offset; }
};

template <int W> using OneWarp = Tiling<W, WARP, KEPT<W> / W>;

// scale: 1 / sqrt(mean of the squares + eps) of each normalised head.
template <typename T, typename Tiles>
__global__ void MZ_BOUNDS(Tiles::THREADS) forward(Heads<T> k, Divisor heads_of_bundle, T* y, float* scale, float eps) {
  constexpr int W = Tiles::W;
  int64_t head = Tiles::row();
  if (head >= k.bundles * heads_of_bundle.by) return;
  int64_t bundle = heads_of_bundle(head), place = head - bundle * heads_of_bundle.by;
  Part<T, Tiles> part(k.x + head * k.d, k.d);
  y += head * k.d;
  if (place > k.repeats) return each_pack<Tiles>(k.d, [&](int64_t i, int p) { store<W>(y + i, part.at(i, p)); });
  float square = 0.0f;
  each_pack<Tiles>(k.d, [&](int64_t i, int p) {
    Floats<W> value = part.at(i, p);
#pragma unroll
    for (int j = 0; j < W; ++j) square += value[j] * value[j];
  });
  float factor = 1.0f / sqrtf(over_group<Tiles::GROUP>(square, Sum()) / (float)k.d + eps), offset = k.offset(place);
  const T* weight = k.weight(place);
  each_pack<Tiles>(k.d, [&](int64_t i, int p) {
    store<W>(y + i, map([&](float v, float g) { return v * factor * (g + offset); }, part.at(i, p), load<W>(weight + i)));
  });
  if (threadIdx.x == 0) scale[bundle * (k.repeats + 1) + place] = factor;
}

// dx of a head: scale * (g w - unit * the mean of g w unit), w being the weight + offset and unit the normalised x. Adds
// g unit to `sums`.
template <typename T, typename Tiles>
MZ_DEVICE void backward_head(const Heads<T>& k, int64_t at, int64_t place, float factor, const T* grad, T* dx, Floats<Tiles::W>* sums) {
  constexpr int W = Tiles::W;
  Part<T, Tiles> in(grad + at, k.d), x(k.x + at, k.d);
  const T* weight = k.weight(place);
  float offset = k.offset(place), along = 0.0f;
  each_pack<Tiles>(k.d, [&](int64_t i, int p) {
    Floats<W> gain = load<W>(weight + i);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      float product = in.at(i, p)[j] * (x.at(i, p)[j] * factor);
      sums[p][j] += product;
      along += product * (gain[j] + offset);
    }
  });
  along = over_group<Tiles::GROUP>(along, Sum()) / (float)k.d;
  each_pack<Tiles>(k.d, [&](int64_t i, int p) {
    auto back = [&](float g, float v, float w) { return factor * (g * (w + offset) - v * factor * along); };
    store<W>(dx + at + i, map(back, in.at(i, p), x.at(i, p), load<W>(weight + i)));
  });
}

// partial[warp][0 or 1][column]: sums of g unit over query heads, and over key heads.
template <typename T, typename Tiles>
__global__ void MZ_BOUNDS(Tiles::THREADS) backward(Heads<T> k, int64_t warps, const T* grad, T* dx, const float* scale, float* partial) {
  constexpr int W = Tiles::W, PACKS = Tiles::PACKS;
  int64_t warp = Tiles::row();
  if (warp >= warps) return;
  Floats<W> of_query[PACKS], of_key[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) of_query[p] = of_key[p] = all_of<W>(0.0f);
  for (int64_t bundle = warp; bundle < k.bundles; bundle += warps) {
    const float* factors = scale + bundle * (k.repeats + 1);
    int64_t at = bundle * (k.repeats + 2) * k.d;
    for (int64_t head = 0; head < k.repeats; ++head, at += k.d)
      backward_head<T, Tiles>(k, at, head, factors[head], grad, dx, of_query);
    backward_head<T, Tiles>(k, at, k.repeats, factors[k.repeats], grad, dx, of_key);
    at += k.d;
    each_pack<Tiles>(k.d, [&](int64_t i, int) { store<W>(dx + at + i, load<W>(grad + at + i)); });
  }
  float* own = partial + warp * 2 * k.d;
  each_pack<Tiles>(k.d, [&](int64_t i, int p) {
    store<W>(own + i, of_query[p]);
    store<W>(own + k.d + i, of_key[p]);
  });
}

template <int W, typename T> int norm_heads(const Launch& to, const Heads<T>& k, T* y, float* scale, float eps) {
  typedef OneWarp<W> Tiles;
  Divisor heads_of_bundle(k.repeats + 2);
  dim3 blocks((unsigned)parts_of(k.bundles * heads_of_bundle.by, Tiles::ROWS));
  return launch(to, forward<T, Tiles>, blocks, Tiles::threads(), k, heads_of_bundle, y, scale, eps);
}

template <int W, typename T>
int norm_heads_backward(Launch& to, const Heads<T>& k, T* dx, float* sums, const T* grad, const float* scale) {
  typedef OneWarp<W> Tiles;
  int64_t warps = smaller<int64_t>(k.bundles, WARPS);
  float* partial = scratch<float>(to, warps * 2 * k.d);
  if (!partial) return MORE_SCRATCH;
  dim3 blocks((unsigned)parts_of(warps, Tiles::ROWS));
  int error = launch(to, backward<T, Tiles>, blocks, Tiles::threads(), k, warps, grad, dx, scale, partial);
  return error ? error : add_parts(to, partial, warps, 2 * k.d, sums);
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                    \
  MZ_API int norm_heads_##SUFFIX(Launch* to, int64_t bundles, int64_t repeats, int64_t d, T* y, const T* x, const T* query,     \
                                 const T* key, float* scale, float eps, float query_offset, float key_offset) {                 \
    constexpr int W = WIDEST<T>;                                                                                                \
    Heads<T> k{bundles, repeats, (int)d, x, query, key, query_offset, key_offset};                                              \
    bool wide = d % W == 0 && aligned<W>(y, x, query, key);                                                                     \
    return wide ? norm_heads<W>(*to, k, y, scale, eps) : norm_heads<1>(*to, k, y, scale, eps);                                  \
  }                                                                                                                             \
  MZ_API int norm_heads_backward_##SUFFIX(Launch* to, int64_t bundles, int64_t repeats, int64_t d, T* dx, float* sums,          \
                                          const T* grad, const T* x, const T* query, const T* key, const float* scale,          \
                                          float query_offset, float key_offset) {                                               \
    constexpr int W = WIDEST<T>;                                                                                                \
    Heads<T> k{bundles, repeats, (int)d, x, query, key, query_offset, key_offset};                                              \
    bool wide = d % W == 0 && aligned<W>(dx, grad, x, query, key);                                                              \
    return wide ? norm_heads_backward<W>(*to, k, dx, sums, grad, scale) : norm_heads_backward<1>(*to, k, dx, sums, grad, scale); \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
