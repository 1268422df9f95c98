// Rotary positions on heads of one vector of d elements: pairs (x_i, x_{i + d/2}) turned by the angle of the row's position.
#include "elements.h"

using namespace mz;

namespace {

// turned: heads [0, turned) of every `group` heads are rotated, the others copied.
struct Shape { Divisor heads_of_position, group; int64_t turned, half; };

// A row is a head, its columns the first half of it: each pack goes with the one of the second half. sign -1: the rotation back.
template <typename T, int W_> struct Rotate {
  static constexpr int W = W_;
  T* y;
  const T* x;
  const float *cos, *sin;
  float sign;
  Shape s;
  MZ_DEVICE void operator()(int64_t head, int64_t column) const {
    int64_t at = head * 2 * s.half + column;
    Floats<W> first = load<W>(x + at), second = load<W>(x + at + s.half);
    if (head - s.group(head) * s.group.by < s.turned) {
      int64_t angle = s.heads_of_position(head) * s.half + column;
      Floats<W> c = load<W>(cos + angle), t = load<W>(sin + angle);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        float a = first[j], b = second[j], u = t[j] * sign;
        first[j] = a * c[j] - b * u;
        second[j] = b * c[j] + a * u;
      }
    }
    store<W>(y + at, first);
    store<W>(y + at + s.half, second);
  }
};

template <typename T>
int rotate(const Launch& to, int64_t heads, const Shape& s, T* y, const T* x, const float* cos, const float* sin, float sign) {
  constexpr int W = WIDEST<T>;
  if (s.half % W == 0 && aligned<W>(y, x) && aligned<W>(cos, sin)) return each_element(to, Rotate<T, W>{y, x, cos, sin, sign, s}, heads, s.half);
  return each_element(to, Rotate<T, 1>{y, x, cos, sin, sign, s}, heads, s.half);
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                 \
  MZ_API int rotate_##SUFFIX(Launch* to, int64_t positions, int64_t repeat, int64_t groups, int64_t group, int64_t turned,   \
                             int64_t half, T* y, const T* x, const float* cos, const float* sin, float sign) {               \
    int64_t of_position = repeat * groups * group;                                                                           \
    return rotate(*to, positions * of_position, {Divisor(of_position), Divisor(group), turned, half}, y, x, cos, sin, sign); \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
