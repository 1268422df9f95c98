// Optimizer steps over flat ranges in one pass: the gradient is read once, weight and moments are read and written once,
// and the 16-bit parameter is written. The step's number, its multiplier and whether it is skipped are read from device
// memory, so the host does not wait for them. One launch serves many ranges.
#include "flat.h"

using namespace mz;

namespace {

constexpr int W = 4, THREADS = 256, PACKS = 2;  // packs of a thread, which are all read before the first is computed
constexpr int64_t BLOCK_PACKS = THREADS * PACKS, BLOCK_ELEMENTS = BLOCK_PACKS * W;
constexpr int MOST = 32;  // ranges of a launch, which are a part of its arguments

// A range as the caller describes it, in memory of the host: 64 bytes.
template <typename G, typename P> struct Described {
  P* out;
  float* w;
  const G* g;
  float *first, *second;
  int64_t n;
  double shrink, decay;
};

// second: of Adam only. shrink: the weight's factor of AdamW.
template <typename G, typename P> struct Range {
  P* out;
  float* w;
  const G* g;
  float *first, *second;
  int64_t n;
  float shrink, decay;
};

// The ranges of a launch. Range i has the blocks from starts[i] on, each for BLOCK_PACKS packs; the first pack begins
// ahead[i] elements behind the begin. What lies before and behind the packs are edges, which are processed one by one:
// all elements, where the arrays are nowhere aligned together.
template <typename G, typename P> struct Ranges {
  typedef Range<G, P> Of;
  Of of[MOST];
  int64_t packs[MOST];
  unsigned starts[MOST];
  unsigned char ahead[MOST];
  int count;

  // Returns the number of blocks with this one.
  unsigned add(const Described<G, P>& range, unsigned blocks) {
    int64_t before = elements_ahead<W>(range.n, range.out, range.w, range.g, range.first, range.second);
    of[count] = {range.out, range.w, range.g, range.first, range.second, range.n, (float)range.shrink, (float)range.decay};
    starts[count] = blocks;
    packs[count] = before < range.n ? (range.n - before) / W : 0;
    ahead[count] = packs[count] ? (unsigned char)before : 0;
    int64_t edges = range.n - packs[count] * W;
    ++count;
    return blocks + (unsigned)larger(parts_of(packs[count - 1], BLOCK_PACKS), parts_of(edges, BLOCK_ELEMENTS));
  }
  MZ_DEVICE int of_block() const {
    int at = 0;
#pragma unroll
    for (int step = MOST / 2; step; step /= 2)
      if (at + step < count && blockIdx.x >= starts[at + step]) at += step;
    return at;
  }
};

// Numbers that the host knows, and pointers to scalars on the device. logs: ln of the betas. new1, new2: 1 - beta,
// rounded once.
struct Adam {
  float lr, log1, log2, new1, beta2, new2, eps;
  const double *step, *multiplier;
  const bool* skip;

  struct Scalars { float step_size, root, multiplier; };
  template <int N> struct Held { Floats<N> w, g, first, second; };

  MZ_DEVICE Scalars scalars() const {
    float number = (float)*step;  // 1 - beta^number without losing the digits of a beta near 1
    return {lr / -expm1f(number * log1), sqrtf(-expm1f(number * log2)), (float)*multiplier};
  }
  template <int N, typename Of> MZ_DEVICE Held<N> read(const Of& of, int64_t i) const {
    Held<N> x;
    x.w = load<N>(of.w + i), x.g = load<N>(of.g + i), x.first = load<N>(of.first + i), x.second = load<N>(of.second + i);
    return x;
  }
  template <int N, typename Of> MZ_DEVICE void write(const Of& of, int64_t i, Held<N> x, const Scalars& now) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float d = x.g[j] * now.multiplier;
      if (of.decay != 0.0f) d += x.w[j] * of.decay;
      x.first[j] += (d - x.first[j]) * new1;
      x.second[j] = x.second[j] * beta2 + d * d * new2;
      x.w[j] = x.w[j] * of.shrink - now.step_size * (x.first[j] / (sqrtf(x.second[j]) / now.root + eps));
    }
    store<N>(of.w + i, x.w), store<N>(of.first + i, x.first), store<N>(of.second + i, x.second);
    if (of.out) store<N>(of.out + i, x.w);
  }
};

struct Sgd {
  float lr, momentum;
  const double* multiplier;
  const bool* skip;

  struct Scalars { float multiplier; };
  template <int N> struct Held { Floats<N> w, g, first; };

  MZ_DEVICE Scalars scalars() const { return {(float)*multiplier}; }
  template <int N, typename Of> MZ_DEVICE Held<N> read(const Of& of, int64_t i) const {
    Held<N> x;
    x.w = load<N>(of.w + i), x.g = load<N>(of.g + i), x.first = load<N>(of.first + i);
    return x;
  }
  template <int N, typename Of> MZ_DEVICE void write(const Of& of, int64_t i, Held<N> x, const Scalars& now) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float d = x.g[j] * now.multiplier;
      if (of.decay != 0.0f) d += x.w[j] * of.decay;
      x.first[j] = x.first[j] * momentum + d;
      x.w[j] -= lr * x.first[j];
    }
    store<N>(of.w + i, x.w), store<N>(of.first + i, x.first);
    if (of.out) store<N>(of.out + i, x.w);
  }
};

// Blocks are many and short, so that the last ones leave no multiprocessor idle for long. Each reads its elements before
// it waits for the scalars.
template <typename Step, typename All> __global__ void MZ_BOUNDS(THREADS) update(Step step, All all) {
  int at = all.of_block();
  const typename All::Of& of = all.of[at];
  int64_t block = blockIdx.x - all.starts[at], packs = all.packs[at], ahead = all.ahead[at], first = block * BLOCK_PACKS + threadIdx.x;
  typename Step::template Held<W> held[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p)
    if (first + p * THREADS < packs) held[p] = step.template read<W>(of, ahead + (first + p * THREADS) * W);
  if (*step.skip) return;
  auto now = step.scalars();
#pragma unroll
  for (int p = 0; p < PACKS; ++p)
    if (first + p * THREADS < packs) step.write(of, ahead + (first + p * THREADS) * W, held[p], now);
  int64_t stop = smaller(of.n - packs * W, (block + 1) * BLOCK_ELEMENTS);
  for (int64_t edge = block * BLOCK_ELEMENTS + threadIdx.x; edge < stop; edge += THREADS) {
    int64_t i = edge < ahead ? edge : edge + packs * W;
    step.write(of, i, step.template read<1>(of, i), now);
  }
}

template <typename Step, typename G, typename P> int run(const Launch& to, const Step& step, int64_t count, const Described<G, P>* ranges) {
  int error = cudaSuccess;
  for (int64_t done = 0; done < count && !error;) {
    Ranges<G, P> all{};
    unsigned blocks = 0;
    for (; done < count && all.count < MOST; ++done)
      if (ranges[done].n) blocks = all.add(ranges[done], blocks);
    if (blocks) error = launch(to, update<Step, Ranges<G, P>>, dim3(blocks), dim3(THREADS), step, all);
  }
  return error;
}

}  // namespace

// ranges: `count` of Described.
#define MZ_STEPS(GRAD, G, OUT, P)                                                                                                      \
  MZ_API int adam_on_device_##GRAD##_##OUT(Launch* to, int64_t count, const void* ranges, const double* step, const double* multiplier, \
                                           const bool* skip, float lr, float log1, float log2, float new1, float beta2, float new2,    \
                                           float eps) {                                                                                \
    Adam body{lr, log1, log2, new1, beta2, new2, eps, step, multiplier, skip};                                                         \
    return run(*to, body, count, static_cast<const Described<G, P>*>(ranges));                                                             \
  }                                                                                                                                    \
  MZ_API int sgd_on_device_##GRAD##_##OUT(Launch* to, int64_t count, const void* ranges, const double* multiplier, const bool* skip,   \
                                          float lr, float momentum) {                                                                  \
    return run(*to, Sgd{lr, momentum, multiplier, skip}, count, static_cast<const Described<G, P>*>(ranges));                              \
  }
#define MZ_STEPS_OF(GRAD, G) MZ_STEPS(GRAD, G, f32, float) MZ_STEPS(GRAD, G, bf16, bf16) MZ_STEPS(GRAD, G, fp16, fp16)
MZ_FOR_DTYPES(MZ_STEPS_OF)
