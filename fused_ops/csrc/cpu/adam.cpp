// One optimizer step over a flat range: gradient read once, weight and moments read and written once, and the 16-bit
// parameter written in the same pass. The operations and their order are those of fused_ops/adam.py.
#include "kernel.h"

using namespace mz;

namespace {

// new1, new2: 1 - beta1 and 1 - beta2, rounded once; in float the difference itself would lose digits of beta2 near 1.
struct AdamNumbers { float step_size, root, shrink, decay, new1, beta2, new2, eps, multiplier; };

// One vector. decay: the L2 term of plain Adam; shrink: the decoupled one of AdamW.
template <typename G, typename P>
MZ_INLINE void adam_lanes(P* out, float* w, const G* g, float* m, float* v, const AdamNumbers& k, int64_t n) {
  F grad = load(g, n) * k.multiplier, weight = load(w, n), first = load(m, n), second = load(v, n);
  if (k.decay != 0.0f) grad += weight * k.decay;
  first += (grad - first) * k.new1;
  second = second * k.beta2 + (grad * grad) * k.new2;
  F root = second;
  for (int i = 0; i < LANES; ++i) root[i] = __builtin_sqrtf(second[i]);
  weight = weight * k.shrink - k.step_size * (first / (root / k.root + k.eps));
  store(m, first, n), store(v, second, n), store(w, weight, n);
  if (out) store(out, weight, n);
}

template <typename G, typename P>
void adam(int64_t threads, int64_t n, P* out, float* w, const G* g, float* m, float* v, AdamNumbers k) {
  parallel_for(n, 1 << 14, (int)threads, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) adam_lanes(out ? out + i : nullptr, w + i, g + i, m + i, v + i, k, LANES);
    if (i < end) adam_lanes(out ? out + i : nullptr, w + i, g + i, m + i, v + i, k, end - i);
  });
}

template <typename G, typename P>
void sgd(int64_t threads, int64_t n, P* out, float* w, const G* g, float* u, float lr, float momentum, float decay, float multiplier) {
  parallel_for(n, 1 << 14, (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += LANES) {
      int64_t some = std::min<int64_t>(LANES, end - i);
      F weight = load(w + i, some), grad = load(g + i, some) * multiplier;
      if (decay != 0.0f) grad += weight * decay;
      F buffer = load(u + i, some) * momentum + grad;
      weight -= lr * buffer;
      store(u + i, buffer, some), store(w + i, weight, some);
      if (out) store(out + i, weight, some);
    }
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
