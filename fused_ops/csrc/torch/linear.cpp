// The weight gradient of a linear layer, into [n, k] (+)= grad [m, n]^T x [m, k], summed and stored in float.
//
// In both operands the summed dimension is the outer one, but the matrix units need it as the inner one. x is packed as
// right operands once. The thread that multiplies a panel of grad transposes it. The order of sums over rows does not
// depend on the number of threads.
#include "tile.h"

using namespace mz;

namespace {

constexpr int64_t PANEL = 128;   // rows and columns of a block of the result
constexpr int64_t DEPTH = 512;   // most rows of grad and x in one product
constexpr int64_t ROUND = 2048;  // rows for which a transposed panel stays in the second cache

struct Shape { int64_t m, n, k, grad_ld, x_ld; };

// Rows of the product whose first row is `first`: no more zeros are multiplied than fill an edge.
MZ_INLINE int64_t depth_at(const Shape& s, int64_t first) { return std::min(DEPTH, round_up(s.m - first, EDGE)); }

// Rows [row, row + ROUND) of x as right operands, [depth][panel] blocks of DEPTH x PANEL.
template <typename T, typename M> void pack_x(int64_t threads, const Shape& s, int64_t row, const T* x, M* packed) {
  int64_t panels = (s.k + PANEL - 1) / PANEL, depths = (std::min(s.m - row, ROUND) + DEPTH - 1) / DEPTH;
  parallel_each(panels * depths, (int)threads, [&](int64_t block) {
    static thread_local Buffer<M> kept;
    int64_t first = row + block / panels * DEPTH, column = block % panels * PANEL, depth = depth_at(s, first);
    M* tile = kept.of(DEPTH * PANEL);
    gather(std::min(s.m - first, depth), std::min(s.k - column, PANEL), x + first * s.x_ld + column, s.x_ld, tile, depth, PANEL);
    to_right(depth, PANEL, tile, packed + block * DEPTH * PANEL);
  });
}

// Columns [column, column + PANEL) of grad, rows as above, as left operands, blocks of PANEL x DEPTH.
template <typename T, typename M> void pack_grad(const Shape& s, int64_t row, int64_t column, const T* grad, M* tile, M* packed) {
  for (int64_t first = row; first < std::min(s.m, row + ROUND); first += DEPTH, packed += PANEL * DEPTH) {
    int64_t depth = depth_at(s, first);
    gather(std::min(s.m - first, depth), std::min(s.n - column, PANEL), grad + first * s.grad_ld + column, s.grad_ld, tile, depth, PANEL);
    to_left_transposed(PANEL, depth, tile, packed);
  }
}

MZ_INLINE void write_block(int64_t rows, int64_t columns, const float* from, float* into, int64_t ld, bool add) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; j += LANES) {
      F value = load(from + i * PANEL + j);
      store(into + i * ld + j, add ? load(into + i * ld + j, columns - j) + value : value, columns - j);
    }
}

template <typename T, typename M> void panel_of_result(const Shape& s, int64_t row, int64_t column, const T* grad, const M* x, float* into, bool add) {
  static thread_local Buffer<M> kept;
  static thread_local Buffer<float> sums;
  M* left = kept.of(PANEL * ROUND + PANEL * DEPTH);
  float* block = sums.of(PANEL * PANEL);
  pack_grad(s, row, column, grad, left + PANEL * ROUND, left);
  int64_t panels = (s.k + PANEL - 1) / PANEL, depths = (std::min(s.m - row, ROUND) + DEPTH - 1) / DEPTH;
  for (int64_t q = 0; q < panels; ++q) {
    for (int64_t d = 0; d < depths; ++d) {
      int64_t depth = depth_at(s, row + d * DEPTH);
      product<M>(PANEL, PANEL, depth, left + d * PANEL * DEPTH, depth, x + (d * panels + q) * DEPTH * PANEL, PANEL, block, PANEL, d > 0);
    }
    write_block(std::min(s.n - column, PANEL), std::min(s.k - q * PANEL, PANEL), block, into + column * s.k + q * PANEL, s.k, add);
  }
  block_gemm_done<M>();
}

template <typename T, typename M> void weight_gradient(int64_t threads, const Shape& s, const T* grad, const T* x, float* into, bool add) {
  static thread_local Buffer<M> kept;
  M* packed = kept.of(round_up(s.k, PANEL) * ROUND);
  for (int64_t row = 0; row < s.m; row += ROUND) {
    pack_x(threads, s, row, x, packed);
    parallel_each((s.n + PANEL - 1) / PANEL, (int)threads, [&](int64_t p) {
      panel_of_result(s, row, p * PANEL, grad, packed, into, add || row > 0);
    });
  }
}

}  // namespace

#define MZ_KERNEL(SUFFIX, T)                                                                                                   \
  MZ_API void weight_gradient_##SUFFIX(int64_t threads, int64_t m, int64_t n, int64_t k, const T* grad, int64_t grad_ld,       \
                                       const T* x, int64_t x_ld, float* into, int64_t add) {                                   \
    Shape s{m, n, k, grad_ld, x_ld};                                                                                           \
    with_operands<T>([&](auto kind) { weight_gradient<T, decltype(kind)>(threads, s, grad, x, into, add != 0); });             \
  }
MZ_KERNEL(bf16, bf16)
MZ_KERNEL(fp16, fp16)

// How block products of a type are made here: a `Layout` of block_trial.h.
#define MZ_LAYOUT(SUFFIX, T) MZ_API void block_layout_##SUFFIX(int64_t, int64_t* answer) { *answer = layout<T>(); }
MZ_FOR_DTYPES(MZ_LAYOUT)
