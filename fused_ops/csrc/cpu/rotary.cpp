// Rotary positions on heads of one vector of d elements: pairs (x_i, x_{i + d/2}) turned by the angle of the row's position.
#include "rows.h"

using namespace mz;

namespace {

// turned: heads [0, turned) of every group of `group` heads are rotated, the others copied. Rows of one position: `repeat`.
struct Shape { int64_t positions, repeat, groups, group, turned, half; };

template <typename T> MZ_INLINE void turn(T* y, const T* x, const float* cos, const float* sin, float sign, int64_t half) {
  each_vector(half, [&](int64_t i, int64_t n) MZ_LAMBDA {
    F c = load(cos + i, n), s = load(sin + i, n) * sign, first = load(x + i, n), second = load(x + half + i, n);
    store(y + i, first * c - second * s, n);
    store(y + half + i, second * c + first * s, n);
  });
}

// sign: 1 forward, -1 for the rotation back, which is the adjoint.
template <typename T> void rotate(int64_t threads, const Shape& s, T* y, const T* x, const float* cos, const float* sin, float sign) {
  int64_t width = 2 * s.half, group = s.group * width, rows = s.positions * s.repeat;
  parallel_for(rows, grain(s.groups * group), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *c = cos + row / s.repeat * s.half, *t = sin + row / s.repeat * s.half;
      for (int64_t g = 0; g < s.groups; ++g) {
        int64_t at = (row * s.groups + g) * group;
        for (int64_t head = 0; head < s.turned; ++head) turn(y + at + head * width, x + at + head * width, c, t, sign, s.half);
        memcpy((void*)(y + at + s.turned * width), x + at + s.turned * width, (s.group - s.turned) * width * sizeof(T));
      }
    }
  });
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                  \
  MZ_API void rotate_##SUFFIX(int64_t threads, int64_t positions, int64_t repeat, int64_t groups, int64_t group,              \
                              int64_t turned, int64_t half, T* y, const T* x, const float* cos, const float* sin,             \
                              float sign) {                                                                                   \
    rotate(threads, {positions, repeat, groups, group, turned, half}, y, x, cos, sin, sign);                                  \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
