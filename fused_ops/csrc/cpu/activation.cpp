// Activations with an optional bias: y = f(x + bias) in one pass, and dx = grad f'(x + bias) with the bias gradient in one pass.
#include "rows.h"

using namespace mz;

namespace {

// x Phi(x). Phi(-a) = exp(-a^2 / 2) t P(t) with t = 1 / (1 + a/4), a >= 0; P was fitted here to a relative error of 4e-8, so that the
// tail keeps its digits. Both the value and the slope take one exponential.
struct Gelu {
  MZ_INLINE F tail(F a, F bell) {
    F t = inverse(1.0f + minimum(a, splat(40.0f)) * 0.25f);  // the bell is 0 long before
    F p = splat(0.01978323608636856f);
    p = p * t - 0.08088228106498718f;
    p = p * t + 0.09560538548140717f;
    p = p * t - 0.03172484412789345f;
    p = p * t + 0.06370282173156738f;
    p = p * t + 0.058974068611860275f;
    p = p * t + 0.0816032811999321f;
    p = p * t + 0.09346634149551392f;
    p = p * t + 0.09973642975091934f;
    p = p * t + 0.0997355654835701f;
    return bell * t * p;
  }
  MZ_INLINE F share(F x, F bell) {
    F below = tail(magnitude(x), bell);
    return x > 0.0f ? 1.0f - below : below;
  }
  MZ_INLINE F value(F x) { return x * share(x, exp(x * x * -0.5f)); }
  MZ_INLINE F slope(F x) {
    F bell = exp(x * x * -0.5f);
    return share(x, bell) + x * (bell * 0.3989422804014327f);
  }
  MZ_INLINE F back(F x, F grad) { return grad * slope(x); }
};

// x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481627260025f;  // 2 sqrt(2/pi), times 0.044715
  MZ_INLINE F value(F x) { return x * sigmoid(x * (LINEAR + CUBIC * (x * x))); }
  // s + x s (1 - s) (2u)'; with e = exp(-|2u|) neither s nor 1 - s is a difference of near numbers, and neither overflows.
  MZ_INLINE F slope(F x) {
    F square = x * x, twice = x * (LINEAR + CUBIC * square);
    F e = exp(below_zero(twice)), near = inverse(1.0f + e), far = e * near;
    F s = twice < 0.0f ? far : near;
    return s + x * (near * far) * (LINEAR + (3.0f * CUBIC) * square);
  }
  MZ_INLINE F back(F x, F grad) { return grad * slope(x); }
};

struct Relu {
  MZ_INLINE F value(F x) { return x <= 0.0f ? splat(0.0f) : x; }  // NaN is not <= 0
  MZ_INLINE F back(F x, F grad) { return x <= 0.0f ? splat(0.0f) : grad; }  // stops even an infinite gradient
};

template <typename Act, typename T> void forward(int64_t threads, int64_t rows, int64_t columns, T* y, const T* x, const T* bias) {
  if (!bias) {
    return parallel_for(rows * columns, 8192, (int)threads, [&](int64_t begin, int64_t end) {
      each_vector(end - begin, [&](int64_t i, int64_t n) MZ_LAMBDA { store(y + begin + i, Act::value(load(x + begin + i, n)), n); });
    });
  }
  parallel_for(rows, grain(columns), (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in = x + row * columns;
      T* out = y + row * columns;
      each_vector(columns, [&](int64_t i, int64_t n) MZ_LAMBDA { store(out + i, Act::value(load(in + i, n) + load(bias + i, n)), n); });
    }
  });
}

template <typename Act, typename T>
void backward(int64_t threads, int64_t rows, int64_t columns, T* dx, float* dbias, const T* grad, const T* x, const T* bias) {
  if (!bias) {
    return parallel_for(rows * columns, 8192, (int)threads, [&](int64_t begin, int64_t end) {
      each_vector(end - begin, [&](int64_t i, int64_t n) MZ_LAMBDA {
        store(dx + begin + i, Act::back(load(x + begin + i, n), load(grad + begin + i, n)), n);
      });
    });
  }
  sum_over_rows(threads, rows, columns, dbias, [&](int64_t begin, int64_t end, float* sums) {
    for (int64_t row = begin; row < end; ++row) {
      const T *in = x + row * columns, *g = grad + row * columns;
      T* out = dx + row * columns;
      each_vector(columns, [&](int64_t i, int64_t n) MZ_LAMBDA {
        F d = Act::back(load(in + i, n) + load(bias + i, n), load(g + i, n));
        store(out + i, d, n);
        store(sums + i, load(sums + i, n) + d, n);
      });
    }
  });
}

}  // namespace

#define MZ_ACTIVATION(NAME, ACT, SUFFIX, T)                                                                                   \
  MZ_API void NAME##_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* y, const T* x, const T* bias) {              \
    forward<ACT>(threads, rows, columns, y, x, bias);                                                                         \
  }                                                                                                                           \
  MZ_API void NAME##_backward_##SUFFIX(int64_t threads, int64_t rows, int64_t columns, T* dx, float* dbias, const T* grad,    \
                                       const T* x, const T* bias) {                                                           \
    backward<ACT>(threads, rows, columns, dx, dbias, grad, x, bias);                                                          \
  }
#define MZ_KERNEL(SUFFIX, T) \
  MZ_ACTIVATION(gelu, Gelu, SUFFIX, T) MZ_ACTIVATION(gelu_tanh, GeluTanh, SUFFIX, T) MZ_ACTIVATION(relu, Relu, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
