// Rotary positions on heads of one vector of elements: pairs turned by the angle of the row's position. Pair i of `half` is
// (x_i, x_{i + half}), or of neighbours (x_2i, x_{2i + 1}). Elements behind the pairs are copied.
#include "elements.h"

using namespace mz;

namespace {

// turned: heads [0, turned) of every `group` heads are rotated, the others copied. width: of a head, its pairs and its rest.
// sign -1: the transposed matrices of the pairs.
template <typename T> struct Heads {
  Divisor heads_of_position, group;
  int64_t turned, half, width;
  T* y;
  const T* x;
  const float *cos, *sin;
  float sign;
  MZ_DEVICE bool turns(int64_t head) const { return head - group(head) * group.by < turned; }
  MZ_DEVICE int64_t angle(int64_t head) const { return heads_of_position(head) * half; }
};

MZ_DEVICE void turn(float& first, float& second, float cos, float sin) {
  float a = first, b = second;
  first = a * cos - b * sin;
  second = b * cos + a * sin;
}

// A row is a head, its columns the first half of the pairs: each pack goes with the one of the second half.
template <typename T, int W> MZ_DEVICE void turn_packs(const Heads<T>& of, int64_t head, int64_t at, int64_t column) {
  Floats<W> first = load<W>(of.x + at), second = load<W>(of.x + at + of.half);
  if (of.turns(head)) {
    int64_t angle = of.angle(head) + column;
    Floats<W> c = load<W>(of.cos + angle), s = load<W>(of.sin + angle);
#pragma unroll
    for (int j = 0; j < W; ++j) turn(first[j], second[j], c[j], s[j] * of.sign);
  }
  store<W>(of.y + at, first);
  store<W>(of.y + at + of.half, second);
}
template <typename T, int W_> struct Rotate {
  static constexpr int W = W_;
  Heads<T> of;
  MZ_DEVICE void operator()(int64_t head, int64_t column) const { turn_packs<T, W>(of, head, head * 2 * of.half + column, column); }
};

// The same with further columns for the rest of a head.
template <typename T, int W_> struct RotatePart {
  static constexpr int W = W_;
  Heads<T> of;
  MZ_DEVICE void operator()(int64_t head, int64_t column) const {
    int64_t at = head * of.width + column;
    if (column < of.half) return turn_packs<T, W>(of, head, at, column);
    store<W>(of.y + at + of.half, load<W>(of.x + at + of.half));
  }
};

// The columns are a whole head. A pack has W / 2 pairs of neighbours.
template <typename T, int W_> struct RotateNeighbours {
  static constexpr int W = W_, PAIRS = W / 2;
  Heads<T> of;
  MZ_DEVICE void operator()(int64_t head, int64_t column) const {
    int64_t at = head * of.width + column;
    Floats<W> pack = load<W>(of.x + at);
    if (column < 2 * of.half && of.turns(head)) {
      int64_t angle = of.angle(head) + column / 2;
      Floats<PAIRS> c = load<PAIRS>(of.cos + angle), s = load<PAIRS>(of.sin + angle);
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) turn(pack[2 * j], pack[2 * j + 1], c[j], s[j] * of.sign);
    }
    store<W>(of.y + at, pack);
  }
};

// Where packs do not fit: the columns are the pairs, and behind these the elements of the rest.
template <typename T> struct RotatePairs {
  static constexpr int W = 1;
  Heads<T> of;
  MZ_DEVICE void operator()(int64_t head, int64_t column) const {
    int64_t at = head * of.width + column;
    if (column >= of.half) return store<1>(of.y + at + of.half, load<1>(of.x + at + of.half));
    at += column;
    Floats<1> first = load<1>(of.x + at), second = load<1>(of.x + at + 1);
    if (of.turns(head)) {
      int64_t angle = of.angle(head) + column;
      turn(first[0], second[0], of.cos[angle], of.sin[angle] * of.sign);
    }
    store<1>(of.y + at, first);
    store<1>(of.y + at + 1, second);
  }
};

template <typename T, int W> int rotate_halves(const Launch& to, int64_t heads, const Heads<T>& of) {
  if (of.width == 2 * of.half) return each_element(to, Rotate<T, W>{of}, heads, of.half);
  return each_element(to, RotatePart<T, W>{of}, heads, of.width - of.half);
}
template <typename T> int halves(const Launch& to, int64_t heads, const Heads<T>& of) {
  constexpr int W = WIDEST<T>;
  bool wide = of.half % W == 0 && of.width % W == 0 && aligned<W>(of.y, of.x) && aligned<W>(of.cos, of.sin);
  return wide ? rotate_halves<T, W>(to, heads, of) : rotate_halves<T, 1>(to, heads, of);
}
template <typename T> int neighbours(const Launch& to, int64_t heads, const Heads<T>& of) {
  constexpr int W = WIDEST<T>;
  bool wide = 2 * of.half % W == 0 && of.width % W == 0 && aligned<W>(of.y, of.x) && aligned<W / 2>(of.cos, of.sin);
  if (wide) return each_element(to, RotateNeighbours<T, W>{of}, heads, of.width);
  return each_element(to, RotatePairs<T>{of}, heads, of.width - of.half);
}

}  // namespace

#define MZ_ROTATE(NAME, SUFFIX, T)                                                                                             \
  MZ_API int rotate_##NAME##_##SUFFIX(Launch* to, int64_t positions, int64_t repeat, int64_t groups, int64_t group,            \
                                      int64_t turned, int64_t half, int64_t rest, T* y, const T* x, const float* cos,          \
                                      const float* sin, float sign) {                                                          \
    int64_t of_position = repeat * groups * group;                                                                             \
    Heads<T> of{Divisor(of_position), Divisor(group), turned, half, 2 * half + rest, y, x, cos, sin, sign};                    \
    return NAME(*to, positions * of_position, of);                                                                             \
  }
#define MZ_KERNEL(SUFFIX, T) MZ_ROTATE(halves, SUFFIX, T) MZ_ROTATE(neighbours, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
