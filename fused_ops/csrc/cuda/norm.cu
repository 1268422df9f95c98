// LayerNorm and RMSNorm, alone or of a sum, and their gradients. The sum is normalised after its rounding.
//
// The gradients of weight and bias are sums over rows. Groups of threads go through many rows each, with their columns'
// sums in registers, so that a row is read once for everything. The number of groups depends on the shape only (and on
// how rows are aligned), and with it the order of the sums.
#include "columns.h"
#include "rows.h"

using namespace mz;

namespace {

constexpr int64_t RESIDENT = 65536;  // threads that go through rows together: half of what fills an H100 leaves them 128 registers

// How a row is shared, and that an offset is added to the weight: a kernel without one does not pay for it.
template <typename Tiles> struct Shifted : Tiles {};
template <typename Tiles> constexpr bool SHIFTS = false;
template <typename Tiles> constexpr bool SHIFTS<Shifted<Tiles>> = true;
template <typename Tiles> MZ_DEVICE float gain_of(float weight, float offset) {
  if constexpr (SHIFTS<Tiles>) return weight + offset;
  else return weight;
}
template <typename Tiles, int W> MZ_DEVICE Floats<W> gain_of(const Floats<W>& weight, float offset) {
  if constexpr (SHIFTS<Tiles>) return map([&](float w) { return w + offset; }, weight);
  else return weight;
}
// Calls launcher(tiles), or launcher(shifted tiles) where there is an offset.
template <bool CENTRED, typename Tiles, typename Launcher> int with_offset(float offset, Tiles tiles, const Launcher& launcher) {
  if constexpr (!CENTRED) {
    if (offset != 0.0f) return launcher(Shifted<Tiles>{});
  }
  return launcher(tiles);
}

template <bool CENTRED, typename T, typename Tiles>
__global__ void MZ_BOUNDS(Tiles::THREADS) forward(int64_t rows, int64_t h, T* y, T* total, const T* x, const T* residual, const T* weight,
                                                   const T* bias, float* mean, float* scale, float eps, float offset) {
  constexpr int W = Tiles::W;
  int64_t row = Tiles::row();
  if (row >= rows) return;
  x += row * h, y += row * h, total += row * h;
  Part<T, Tiles> part(x, h);
  if (residual) {
    Part<T, Tiles> other(residual + row * h, h);
    each_pack<Tiles>(h, [&](int64_t i, int p) {
      Floats<W> value = map([](float a, float b) { return rounded<T>(a + b); }, part.at(i, p), other.at(i, p));
      store<W>(total + i, value);
      if constexpr (Tiles::KEEPS) part.kept[p] = value;
    });
    part.row = total;  // a thread reads again only elements that it has written itself
  }
  float centre = 0.0f, length = (float)(typename Tiles::Index)h;
  if constexpr (CENTRED) {
    each_pack<Tiles>(h, [&](int64_t i, int p) {
      Floats<W> value = part.at(i, p);
#pragma unroll
      for (int j = 0; j < W; ++j) centre += value[j];
    });
    centre = over_group<Tiles::GROUP>(centre, Sum()) / length;
  }
  float square = 0.0f;
  each_pack<Tiles>(h, [&](int64_t i, int p) {
    Floats<W> value = part.at(i, p);
#pragma unroll
    for (int j = 0; j < W; ++j) square += (value[j] - centre) * (value[j] - centre);
  });
  float factor = 1.0f / sqrtf(over_group<Tiles::GROUP>(square, Sum()) / length + eps);
  each_pack<Tiles>(h, [&](int64_t i, int p) {
    Floats<W> value = part.at(i, p), gain = load<W>(weight + i);
    value = map([&](float v, float g) { return (v - centre) * factor * gain_of<Tiles>(g, offset); }, value, gain);
    if constexpr (CENTRED) value = value + load<W>(bias + i);
    store<W>(y + i, value);
  });
  if (threadIdx.x == 0) {
    if constexpr (CENTRED) mean[row] = centre;
    scale[row] = factor;
  }
}

// The inputs of a gradient. passed: that of the sum itself, or null.
template <typename T> struct Gradient {
  int64_t rows, h;
  T* dx;
  const T *grad, *passed, *x, *weight;
  const float *mean, *scale;
  float offset;
};

// What a row's gradient is made of. As it is stored: the next row of a thread is on its way while it works on this one.
template <bool CENTRED, typename T, typename Tiles> struct Row {
  Stored<T, Tiles> x, grad, passed;
  float centre, factor;

  MZ_DEVICE Row(const Gradient<T>& k, int64_t row)
      : x(k.x + row * k.h, k.h), grad(k.grad + row * k.h, k.h), passed(k.passed + row * k.h, k.passed ? k.h : 0),
        centre(CENTRED ? k.mean[row] : 0.0f), factor(k.scale[row]) {}
};

// dx of a row, w being the weight + offset: scale * (g w - its mean - unit * the mean of g w unit) + passed, unit being the normalised x.
template <bool CENTRED, typename T, typename Tiles, typename Weight, typename PerPack>
MZ_DEVICE void backward_row(const Gradient<T>& k, const Row<CENTRED, T, Tiles>& of, const Weight& weight, T* dx, const PerPack& per_pack) {
  constexpr int W = Tiles::W;
  float length = (float)(typename Tiles::Index)k.h;
  Floats<2> sums{{0.0f, 0.0f}};
  each_pack<Tiles>(k.h, [&](int64_t i, int p) {
    Floats<W> gain = gain_of<Tiles>(weight.at(i, p), k.offset), in = of.grad.at(i, p);
    Floats<W> unit = map([&](float v) { return (v - of.centre) * of.factor; }, of.x.at(i, p));
#pragma unroll
    for (int j = 0; j < W; ++j) {
      sums[0] += in[j] * gain[j];
      sums[1] += in[j] * gain[j] * unit[j];
    }
    per_pack(p, in, unit);
  });
  sums = over_group<Tiles::GROUP>(sums, Sum());
  float average = CENTRED ? sums[0] / length : 0.0f, along = sums[1] / length;
  each_pack<Tiles>(k.h, [&](int64_t i, int p) {
    Floats<W> value = map(
        [&](float v, float g, float w) { return of.factor * (g * gain_of<Tiles>(w, k.offset) - average - (v - of.centre) * of.factor * along); },
        of.x.at(i, p), of.grad.at(i, p), weight.at(i, p));
    if (k.passed) value = value + of.passed.at(i, p);
    store<W>(dx + i, value);
  });
}

// Whether a thread's registers hold the weight and a second row too. Else the weight is read from the cache.
template <typename T> constexpr bool FITS = sizeof(T) == 2;

// Rows in registers: a group takes every groups-th row. partial[group][0 or 1][column]: sums of g unit, and of g.
template <bool CENTRED, typename T, typename Tiles>
__global__ void MZ_BOUNDS(Tiles::THREADS) backward(Gradient<T> k, int64_t groups, float* partial) {
  constexpr int W = Tiles::W, PACKS = Tiles::PACKS, ARRAYS = CENTRED ? 2 : 1;
  int64_t group = Tiles::row();
  if (group >= groups) return;
  Floats<W> of_weight[PACKS], of_bias[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) of_weight[p] = of_bias[p] = all_of<W>(0.0f);
  const Stored<T, std::conditional_t<FITS<T>, Tiles, Tiling<W, Tiles::GROUP, 0>>> weight(k.weight, k.h);
  typedef Row<CENTRED, T, Tiles> Own;
  auto add = [&](int64_t row, const Own& own) {
    backward_row(k, own, weight, k.dx + row * k.h, [&](int p, const Floats<W>& in, const Floats<W>& unit) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        of_weight[p][j] += in[j] * unit[j];
        if constexpr (CENTRED) of_bias[p][j] += in[j];
      }
    });
  };
  if constexpr (FITS<T>) {
    Own next(k, group);
    for (int64_t row = group; row < k.rows; row += groups) {
      Own own = next;
      if (row + groups < k.rows) next = Own(k, row + groups);
      add(row, own);
    }
  } else {
    for (int64_t row = group; row < k.rows; row += groups) add(row, Own(k, row));
  }
  float* own = partial + group * ARRAYS * k.h;
  each_pack<Tiles>(k.h, [&](int64_t i, int p) {
    store<W>(own + i, of_weight[p]);
    if constexpr (CENTRED) store<W>(own + k.h + i, of_bias[p]);
  });
}

// Longer rows: their dx alone, and the sums with a second reading.
template <bool CENTRED, typename T, typename Tiles> __global__ void MZ_BOUNDS(Tiles::THREADS) backward_long(Gradient<T> k) {
  Row<CENTRED, T, Tiles> own(k, Tiles::row());
  backward_row(k, own, Stored<T, Tiles>(k.weight, k.h), k.dx + Tiles::row() * k.h, [](int, const auto&, const auto&) {});
}
template <bool CENTRED, typename T, int W_> struct ParameterGradient {
  static constexpr int W = W_, ARRAYS = CENTRED ? 2 : 1, AHEAD = 2;
  struct Inputs { Words<T, W> grad, x; float centre, factor; };
  const T *grad, *x;
  const float *mean, *scale;
  int64_t h;
  MZ_DEVICE Inputs read(int64_t row, int64_t column) const {
    int64_t at = row * h + column;
    return {fetch<W>(grad + at), fetch<W>(x + at), CENTRED ? mean[row] : 0.0f, scale[row]};
  }
  MZ_DEVICE Sums<ARRAYS, W> operator()(const Inputs& of, int64_t, int64_t) const {
    Floats<W> in = widened(of.grad);
    Sums<ARRAYS, W> result;
    result.of[0] = map([&](float g, float v) { return g * ((v - of.centre) * of.factor); }, in, widened(of.x));
    if constexpr (CENTRED) result.of[1] = in;
    return result;
  }
};

template <bool CENTRED, typename T, typename Tiles> int backwards(Launch& to, const Gradient<T>& k, float* sums) {
  constexpr int ARRAYS = CENTRED ? 2 : 1;
  if constexpr (Tiles::KEEPS) {
    int64_t groups = smaller<int64_t>(k.rows, RESIDENT / Tiles::GROUP);
    float* partial = scratch<float>(to, groups * ARRAYS * k.h);
    if (!partial) return MORE_SCRATCH;
    dim3 blocks((unsigned)parts_of(groups, Tiles::ROWS));
    int error = launch(to, backward<CENTRED, T, Tiles>, blocks, Tiles::threads(), k, groups, partial);
    return error ? error : add_parts(to, partial, groups, ARRAYS * k.h, sums);
  } else {
    ParameterGradient<CENTRED, T, Tiles::W> body{k.grad, k.x, k.mean, k.scale, k.h};
    int error = sum_over_rows(to, body, k.rows, k.h, sums);
    return error ? error : launch(to, backward_long<CENTRED, T, Tiles>, dim3((unsigned)k.rows), Tiles::threads(), k);
  }
}

}  // namespace

#define MZ_NORM(NAME, CENTRED, SUFFIX, T)                                                                                              \
  MZ_API int NAME##_##SUFFIX(Launch* to, int64_t rows, int64_t h, T* y, T* total, const T* x, const T* residual, const T* weight,      \
                             const T* bias, float* mean, float* scale, float eps, float offset) {                                      \
    bool wide = h % WIDEST<T> == 0 && aligned<WIDEST<T>>(y, total, x, residual, weight, bias);                                         \
    return with_tiling<T>(h, wide, [&](auto plain) {                                                                                   \
      return with_offset<CENTRED>(offset, plain, [&](auto tiles) {                                                                     \
        typedef decltype(tiles) Tiles;                                                                                                 \
        dim3 blocks((unsigned)parts_of(rows, Tiles::ROWS));                                                                            \
        return launch(*to, forward<CENTRED, T, Tiles>, blocks, Tiles::threads(), rows, h, y, total, x, residual, weight, bias, mean,   \
                      scale, eps, offset);                                                                                             \
      });                                                                                                                              \
    });                                                                                                                                \
  }                                                                                                                                    \
  MZ_API int NAME##_backward_##SUFFIX(Launch* to, int64_t rows, int64_t h, T* dx, float* sums, const T* grad, const T* passed,         \
                                      const T* x, const T* weight, const float* mean, const float* scale, float offset) {              \
    bool wide = h % WIDEST<T> == 0 && aligned<WIDEST<T>>(dx, grad, passed, x, weight);                                                 \
    Gradient<T> k{rows, h, dx, grad, passed, x, weight, mean, scale, offset};                                                          \
    return with_tiling<T>(h, wide, [&](auto plain) {                                                                                   \
      return with_offset<CENTRED>(offset, plain, [&](auto tiles) { return backwards<CENTRED, T, decltype(tiles)>(*to, k, sums); });    \
    });                                                                                                                                \
  }
#define MZ_KERNEL(SUFFIX, T) MZ_NORM(layer_norm, true, SUFFIX, T) MZ_NORM(rms_norm, false, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
