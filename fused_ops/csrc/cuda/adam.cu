// One optimizer step over a flat range in one pass: the gradient is read once, weight and moments are read and written
// once, and the 16-bit parameter is written. The step's number, its multiplier and whether it is skipped are read from
// device memory, so the host does not wait for them.
#include "flat.h"

using namespace mz;

namespace {

constexpr int W = 4, THREADS = 256;
constexpr int64_t BLOCKS = 2048;  // enough to fill every GPU; a block loops over its packs

// Numbers that the host knows, and pointers to scalars on the device. logs: ln of the betas. new1, new2: 1 - beta,
// rounded once.
struct Adam {
  float lr, shrink, decay, log1, log2, new1, beta2, new2, eps;
  const double *step, *multiplier;
  const bool* skip;
};
struct Sgd {
  float lr, momentum, decay;
  const double* multiplier;
  const bool* skip;
};

template <typename G, typename P> struct AdamStep {
  P* out;
  float* w;
  const G* g;
  float *m, *v;
  Adam k;
  struct Scalars { float step_size, root, multiplier; };
  MZ_DEVICE Scalars scalars() const {
    float number = (float)*k.step;  // 1 - beta^number without losing the digits of a beta near 1
    return {k.lr / -expm1f(number * k.log1), sqrtf(-expm1f(number * k.log2)), (float)*k.multiplier};
  }
  template <int N> MZ_DEVICE void operator()(int64_t i, const Scalars& now) const {
    Floats<N> weight = load<N>(w + i), grad = load<N>(g + i), first = load<N>(m + i), second = load<N>(v + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float d = grad[j] * now.multiplier;
      if (k.decay != 0.0f) d += weight[j] * k.decay;
      first[j] += (d - first[j]) * k.new1;
      second[j] = second[j] * k.beta2 + d * d * k.new2;
      weight[j] = weight[j] * k.shrink - now.step_size * (first[j] / (sqrtf(second[j]) / now.root + k.eps));
    }
    store<N>(w + i, weight), store<N>(m + i, first), store<N>(v + i, second);
    if (out) store<N>(out + i, weight);
  }
};

template <typename G, typename P> struct SgdStep {
  P* out;
  float* w;
  const G* g;
  float* u;
  Sgd k;
  struct Scalars { float multiplier; };
  MZ_DEVICE Scalars scalars() const { return {(float)*k.multiplier}; }
  template <int N> MZ_DEVICE void operator()(int64_t i, const Scalars& now) const {
    Floats<N> weight = load<N>(w + i), grad = load<N>(g + i), moment = load<N>(u + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float d = grad[j] * now.multiplier;
      if (k.decay != 0.0f) d += weight[j] * k.decay;
      moment[j] = moment[j] * k.momentum + d;
      weight[j] -= k.lr * moment[j];
    }
    store<N>(w + i, weight), store<N>(u + i, moment);
    if (out) store<N>(out + i, weight);
  }
};

template <typename Step> __global__ void MZ_BOUNDS(THREADS) update(Step step, int64_t n, int64_t ahead) {
  if (*step.k.skip) return;
  auto now = step.scalars();
  int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, stride = (int64_t)gridDim.x * THREADS;
  int64_t packs = (n - ahead) / W, packed = ahead + packs * W;
  for (int64_t i = first; i < packs; i += stride) step.template operator()<W>(ahead + i * W, now);
  for (int64_t i = first; i < ahead + n - packed; i += stride) step.template operator()<1>(i < ahead ? i : packed + i - ahead, now);
}

template <typename Step> int run(const Launch& to, const Step& step, int64_t n, int64_t ahead) {
  int64_t items = ahead < n ? parts_of(n, W) : n;
  int64_t blocks = smaller<int64_t>(BLOCKS, parts_of(items, THREADS));
  return n ? launch(to, update<Step>, dim3((unsigned)blocks), dim3(THREADS), step, n, ahead) : cudaSuccess;
}

}  // namespace

#define MZ_STEPS(GRAD, G, OUT, P)                                                                                                        \
  MZ_API int adam_on_device_##GRAD##_##OUT(Launch* to, int64_t n, P* out, float* w, const G* g, float* m, float* v, const double* step,  \
                                           const double* multiplier, const bool* skip, float lr, float shrink, float decay, float log1,  \
                                           float log2, float new1, float beta2, float new2, float eps) {                                 \
    AdamStep<G, P> body{out, w, g, m, v, {lr, shrink, decay, log1, log2, new1, beta2, new2, eps, step, multiplier, skip}};               \
    return run(*to, body, n, elements_ahead<W>(n, out, w, g, m, v));                                                                     \
  }                                                                                                                                      \
  MZ_API int sgd_on_device_##GRAD##_##OUT(Launch* to, int64_t n, P* out, float* w, const G* g, float* u, const double* multiplier,       \
                                          const bool* skip, float lr, float momentum, float decay) {                                     \
    SgdStep<G, P> body{out, w, g, u, {lr, momentum, decay, multiplier, skip}};                                                           \
    return run(*to, body, n, elements_ahead<W>(n, out, w, g, u));                                                                        \
  }
#define MZ_STEPS_OF(GRAD, G) MZ_STEPS(GRAD, G, f32, float) MZ_STEPS(GRAD, G, bf16, bf16) MZ_STEPS(GRAD, G, fp16, fp16)
MZ_FOR_DTYPES(MZ_STEPS_OF)
