// Rotary positions on heads of one vector of elements: pairs turned by the angle of the row's position. Pair i of `half` is
// (x_i, x_{i + half}), or of neighbours (x_2i, x_{2i + 1}). Elements behind the pairs are copied.
#include "rows.h"

using namespace mz;

namespace {

// turned: heads [0, turned) of every group of `group` heads are rotated, the others copied. Rows of one position: `repeat`.
struct Shape {
  int64_t positions, repeat, groups, group, turned, half, rest;
  int64_t width() const { return 2 * half + rest; }
};

// The first and the second elements of LANES pairs of neighbours, and back. Words of bf16 are such pairs.
MZ_INLINE Two load_pairs(const bf16* p) { return load_two(p); }
MZ_INLINE void store_pairs(bf16* p, Two x) { store_two(p, x); }
template <typename T> MZ_INLINE Two load_pairs(const T* p) {
  float pairs[2 * LANES], first[LANES], second[LANES];
  store(pairs, load(p)), store(pairs + LANES, load(p + LANES));
  for (int i = 0; i < LANES; ++i) first[i] = pairs[2 * i], second[i] = pairs[2 * i + 1];
  return {load(first), load(second)};
}
template <typename T> MZ_INLINE void store_pairs(T* p, Two x) {
  float pairs[2 * LANES], first[LANES], second[LANES];
  store(first, x.first), store(second, x.second);
  for (int i = 0; i < LANES; ++i) pairs[2 * i] = first[i], pairs[2 * i + 1] = second[i];
  store(p, load(pairs)), store(p + LANES, load(pairs + LANES));
}
template <typename T> MZ_INLINE Two load_pairs(const T* p, int64_t n) {
  if (n >= LANES) return load_pairs(p);
  T whole[2 * LANES] = {};
  memcpy((void*)whole, p, 2 * n * sizeof(T));
  return load_pairs(whole);
}
template <typename T> MZ_INLINE void store_pairs(T* p, Two x, int64_t n) {
  if (n >= LANES) return store_pairs(p, x);
  T whole[2 * LANES];
  store_pairs(whole, x);
  memcpy((void*)p, whole, 2 * n * sizeof(T));
}

struct Halves {
  template <typename T> static MZ_MEMBER Two load(const T* x, int64_t i, int64_t half, int64_t n) {
    return {mz::load(x + i, n), mz::load(x + half + i, n)};
  }
  template <typename T> static MZ_MEMBER void store(T* y, Two x, int64_t i, int64_t half, int64_t n) {
    mz::store(y + i, x.first, n);
    mz::store(y + half + i, x.second, n);
  }
};
struct Neighbours {
  template <typename T> static MZ_MEMBER Two load(const T* x, int64_t i, int64_t, int64_t n) { return load_pairs(x + 2 * i, n); }
  template <typename T> static MZ_MEMBER void store(T* y, Two x, int64_t i, int64_t, int64_t n) { store_pairs(y + 2 * i, x, n); }
};

template <typename Pairs, typename T>
MZ_INLINE void turn(T* y, const T* x, const float* cos, const float* sin, float sign, const Shape& s) {
  each_vector(s.half, [&](int64_t i, int64_t n) MZ_LAMBDA {
    F c = load(cos + i, n), t = load(sin + i, n) * sign;
    Two x_i = Pairs::load(x, i, s.half, n);
    Pairs::store(y, {x_i.first * c - x_i.second * t, x_i.second * c + x_i.first * t}, i, s.half, n);
  });
  if (s.rest) memcpy((void*)(y + 2 * s.half), x + 2 * s.half, s.rest * sizeof(T));
}

// sign: 1 forward, -1 for the transposed matrices of the pairs: the adjoint.
template <typename Pairs, typename T>
void rotate(int64_t threads, const Shape& s, T* y, const T* x, const float* cos, const float* sin, float sign) {
  int64_t width = s.width(), group = s.group * width, rows = s.positions * s.repeat;
  parallel_for(rows, grain(s.groups * group), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *c = cos + row / s.repeat * s.half, *t = sin + row / s.repeat * s.half;
      for (int64_t g = 0; g < s.groups; ++g) {
        int64_t at = (row * s.groups + g) * group;
        for (int64_t head = 0; head < s.turned; ++head) turn<Pairs>(y + at + head * width, x + at + head * width, c, t, sign, s);
        memcpy((void*)(y + at + s.turned * width), x + at + s.turned * width, (s.group - s.turned) * width * sizeof(T));
      }
    }
  });
}

}  // namespace

#define MZ_ROTATE(NAME, PAIRS, SUFFIX, T)                                                                                     \
  MZ_API void rotate_##NAME##_##SUFFIX(int64_t threads, int64_t positions, int64_t repeat, int64_t groups, int64_t group,     \
                                       int64_t turned, int64_t half, int64_t rest, T* y, const T* x, const float* cos,        \
                                       const float* sin, float sign) {                                                        \
    rotate<PAIRS>(threads, {positions, repeat, groups, group, turned, half, rest}, y, x, cos, sin, sign);                     \
  }
#define MZ_KERNEL(SUFFIX, T) MZ_ROTATE(halves, Halves, SUFFIX, T) MZ_ROTATE(neighbours, Neighbours, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
