// One optimizer step over a flat range: gradient read once, weight and moments read and written once, and the 16-bit
// parameter written in the same pass. The operations and their order are those of fused_ops/adam.py.
#include "rows.h"

using namespace mz;

namespace {

// new1, new2: 1 - beta1 and 1 - beta2, computed in double and rounded once. In float, 1 - beta2 would lose digits near
// 1.
struct AdamNumbers { float step_size, root, shrink, decay, new1, beta2, new2, eps, multiplier; };

// Calls body(i, lanes) for all vectors of a range. Vectors are aligned for `out`, which is written past the caches.
template <typename P, typename Body> void each_aligned(int64_t threads, int64_t n, const P* out, const Body& body) {
  parallel_for(n, 1 << 14, (int)threads, [&](int64_t begin, int64_t end) {
    int64_t ahead = -((int64_t)(reinterpret_cast<uintptr_t>(out) / sizeof(P)) + begin) & (LANES - 1);
    int64_t i = std::min(begin + ahead, end);
    if (i > begin) body(begin, i - begin);
    for (; i + LANES <= end; i += LANES) body(i, int64_t(LANES));
    if (i < end) body(i, end - i);
    streamed();
  });
}

template <typename P> MZ_INLINE void write(P* out, int64_t i, F weight, int64_t n) {
  if (out) n == LANES ? stream(out + i, weight) : store_exact(out + i, weight, n);
}

// One vector. decay: the L2 term of plain Adam; shrink: the decoupled one of AdamW.
template <typename G>
MZ_INLINE F adam_lanes(float* w, const G* g, float* m, float* v, const AdamNumbers& k, int64_t n) {
  F grad = load(g, n) * k.multiplier, weight = load(w, n), first = load(m, n), second = load(v, n);
  if (k.decay != 0.0f) grad += weight * k.decay;
  first += (grad - first) * k.new1;
  second = second * k.beta2 + (grad * grad) * k.new2;
  F root = square_root(second);
  weight = weight * k.shrink - k.step_size * (first / (root / k.root + k.eps));
  store(m, first, n), store(v, second, n), store(w, weight, n);
  return weight;
}

template <typename G, typename P>
void adam(int64_t threads, int64_t n, P* out, float* w, const G* g, float* m, float* v, AdamNumbers k) {
  each_aligned(threads, n, out, [&](int64_t i, int64_t lanes) MZ_LAMBDA {
    write(out, i, adam_lanes(w + i, g + i, m + i, v + i, k, lanes), lanes);
  });
}

template <typename G, typename P>
void sgd(int64_t threads, int64_t n, P* out, float* w, const G* g, float* u, float lr, float momentum, float decay, float multiplier) {
  each_aligned(threads, n, out, [&](int64_t i, int64_t lanes) MZ_LAMBDA {
    F weight = load(w + i, lanes), grad = load(g + i, lanes) * multiplier;
    if (decay != 0.0f) grad += weight * decay;
    F buffer = load(u + i, lanes) * momentum + grad;
    weight -= lr * buffer;
    store(u + i, buffer, lanes), store(w + i, weight, lanes);
    write(out, i, weight, lanes);
  });
}

}  // namespace

#define MZ_STEPS(GRAD, G, OUT, P)                                                                                            \
  MZ_API void adam_##GRAD##_##OUT(int64_t threads, int64_t n, P* out, float* w, const G* g, float* m, float* v,              \
                                  float step_size, float root, float shrink, float decay, float new1, float beta2,           \
                                  float new2, float eps, float multiplier) {                                                 \
    adam<G, P>(threads, n, out, w, g, m, v, {step_size, root, shrink, decay, new1, beta2, new2, eps, multiplier});           \
  }                                                                                                                          \
  MZ_API void sgd_##GRAD##_##OUT(int64_t threads, int64_t n, P* out, float* w, const G* g, float* u, float lr,               \
                                 float momentum, float decay, float multiplier) {                                            \
    sgd<G, P>(threads, n, out, w, g, u, lr, momentum, decay, multiplier);                                                    \
  }
#define MZ_STEPS_OF(GRAD, G) MZ_STEPS(GRAD, G, f32, float) MZ_STEPS(GRAD, G, bf16, bf16) MZ_STEPS(GRAD, G, fp16, fp16)
MZ_FOR_DTYPES(MZ_STEPS_OF)
