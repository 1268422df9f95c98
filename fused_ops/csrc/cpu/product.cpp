// Matrix products C [m, n] (+)= scale A [m, k] B [k, n] + bias, of float, bfloat16 or half factors. Sums are float, and
// are rounded once.
//
// These are for processors without instructions that multiply 16 bits, and for float where the usual library is slower.
// Both factors are packed into panels that the multiplier reads in order (Goto and van de Geijn, "Anatomy of
// high-performance matrix multiplication", 2008). A 16-bit factor becomes float on that way, which costs nothing beside
// the packing: less is read. A thread computes tiles of C and packs for itself. The order of the sums depends on k
// alone, not on the number of threads or on the place in C.
#include "buffer.h"
#include "kernel.h"
#include "transpose.h"

using namespace mz;

namespace {

// A block of C that stays in registers while k passes by: ROWS x VECTORS sums beside VECTORS of B and one of A.
#if defined(__AVX512F__)
constexpr int ROWS = 14, VECTORS = 2;  // of 32 registers
#elif defined(__AVX2__)
constexpr int ROWS = 6, VECTORS = 2;  // of 16
#else
constexpr int ROWS = 2, VECTORS = 4;  // of 16
#endif
constexpr int COLUMNS = NATIVE * VECTORS;
static_assert(COLUMNS % LANES == 0 && ROWS <= NATIVE);

constexpr int64_t DEPTH = 512;                  // of k in one packing: a panel of B is then 32 KiB
constexpr int64_t LEFT = 96 / ROWS * ROWS;      // rows of A that stay packed in the second cache
constexpr int64_t HEIGHT = 768 / ROWS * ROWS;   // of a tile of C: as often is a packed number of B used
constexpr int64_t BREADTH = 512;                // and of A

// The first n numbers, and 0 behind them.
template <typename T> MZ_INLINE NativeF load_some(const T* p, int64_t n) {
  if (n >= NATIVE) return load_native(p);
  T whole[NATIVE] = {};
  if (n > 0) memcpy(static_cast<void*>(whole), p, n * sizeof(T));
  return load_native(whole);
}

// One number in all lanes. The compiler would load several neighbours at once, and then has too few registers.
MZ_INLINE NativeF in_all_lanes(const float* p) {
#ifdef __AVX2__
  NativeF x;
  asm("vbroadcastss %1, %0" : "=v"(x) : "m"(*p));
  return x;
#else
  return NativeF{} + *p;
#endif
}

// A factor as lines along which is summed: rows of A, columns of B. Line i has its number p at i * line + p * inner, and
// one of both strides is 1.
template <typename T> struct Factor { const T* data; int64_t line, inner; };

// `lines` lines (all that are left, but LINES at most count) at the depths [0, depth) -> panel [depth, LINES], with zeros
// for what is missing. A vector may be longer than LINES: what it writes behind its row is written again by the next
// row, and behind the panel by the next panel. A buffer is NATIVE longer than its panels.
template <int LINES, typename T> MZ_INLINE void pack(const Factor<T>& f, int64_t lines, int64_t depth, float* panel) {
  for (int v = 0; v < LINES; v += NATIVE)
    if (f.inner != 1)
      for (int64_t p = 0; p < depth; ++p) store_native(panel + p * LINES + v, load_some(f.data + p * f.inner + v, lines - v));
    else
      for (int64_t p = 0; p < depth; p += NATIVE) {
        NativeF x[NATIVE];
        int64_t present = std::min<int64_t>(lines, LINES) - v;
#pragma GCC unroll 16
        for (int i = 0; i < NATIVE; ++i) x[i] = i < present ? load_some(f.data + (v + i) * f.line + p, depth - p) : NativeF{};
        transpose(x);
        for (int q = 0; q < std::min<int64_t>(NATIVE, depth - p); ++q) store_native(panel + (p + q) * LINES + v, x[q]);
      }
}

// All lines of a tile, in panels of LINES.
template <int LINES, typename T>
void pack_all(const Factor<T>& f, int64_t first, int64_t lines, int64_t from, int64_t depth, float* panels) {
  for (int64_t i = 0; i < lines; i += LINES, panels += depth * LINES)
    pack<LINES>(Factor<T>{f.data + (first + i) * f.line + from * f.inner, f.line, f.inner}, lines - i, depth, panels);
}

// What becomes of finished sums: C (+)= scale sums + bias.
template <typename T, typename O> struct Product {
  int64_t m, n, k;
  Factor<T> a, b;
  O* c;
  int64_t ld;
  const T* bias;
  float scale;
  bool add;

  void write(int64_t i, int64_t j, const float* sums) const {  // sums [ROWS, COLUMNS] of C from (i, j)
    for (int64_t r = 0; r < std::min<int64_t>(ROWS, m - i); ++r, sums += COLUMNS)
      for (int64_t v = 0; v < std::min<int64_t>(COLUMNS, n - j); v += LANES) {
        O* out = c + (i + r) * ld + j + v;
        F x = load(sums + v) * scale;
        if (bias) x += load(bias + j + v, n - j - v);
        if (add) x += load(out, n - j - v);
        store(out, x, n - j - v);
      }
  }
};

// A block of C at (i, j): the sums over one depth, added to those of the depths before (in `kept`, whose rows are
// BREADTH long), are kept or, after the last depth, written to C.
template <bool FIRST, bool LAST, typename T, typename O>
void block(const Product<T, O>& product, int64_t i, int64_t j, int64_t depth, const float* left, const float* right, float* kept) {
  NativeF sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = NativeF{};
  for (int64_t p = 0; p < depth; ++p, left += ROWS, right += COLUMNS) {
    NativeF row[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) row[v] = load_native(right + v * NATIVE);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      NativeF factor = in_all_lanes(left + r);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sums[r][v] += factor * row[v];
    }
  }
  alignas(64) float whole[ROWS * COLUMNS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      float* before = kept + r * BREADTH + v * NATIVE;
      NativeF total = FIRST ? sums[r][v] : load_native(before) + sums[r][v];
      store_native(LAST ? whole + r * COLUMNS + v * NATIVE : before, total);
    }
  if (LAST) product.write(i, j, whole);
}

// What a thread keeps for its next product, of whatever types.
struct Panels { Buffer<float> left, right, sums; };
Panels& panels_of_this_thread() {
  static thread_local Panels mine;
  return mine;
}

// The rows [i, i + rows) and columns [j, j + columns) of C.
template <typename T, typename O> void tile(const Product<T, O>& product, int64_t i, int64_t rows, int64_t j, int64_t columns) {
  Panels& mine = panels_of_this_thread();
  float *right = mine.right.of(DEPTH * BREADTH + NATIVE), *left = mine.left.of(DEPTH * LEFT + NATIVE);
  float* kept = product.k > DEPTH ? mine.sums.of(HEIGHT * BREADTH) : nullptr;
  for (int64_t from = 0; from == 0 || from < product.k; from += DEPTH) {  // once at k = 0: C is then the bias
    int64_t depth = std::min(DEPTH, product.k - from);
    bool first = from == 0, last = from + depth >= product.k;
    auto one = first ? last ? block<true, true, T, O> : block<true, false, T, O> : last ? block<false, true, T, O> : block<false, false, T, O>;
    pack_all<COLUMNS>(product.b, j, columns, from, depth, right);
    for (int64_t top = 0; top < rows; top += LEFT) {
      int64_t height = std::min(LEFT, rows - top);
      pack_all<ROWS>(product.a, i + top, height, from, depth, left);
      for (int64_t q = 0; q < columns; q += COLUMNS)
        for (int64_t r = 0; r < height; r += ROWS)
          one(product, i + top + r, j + q, depth, left + r * depth, right + q * depth, kept + (top + r) * BREADTH + q);
    }
  }
}

// Into how many tiles a side is cut: whole tiles, and more of them until all threads have as many, or enough.
struct Cut {
  int64_t height, breadth, rows, columns;
  Cut(int64_t threads, int64_t batch, int64_t m, int64_t n) {
    columns = (n + BREADTH - 1) / BREADTH, rows = (m + HEIGHT - 1) / HEIGHT;
    auto uneven = [&] { return batch * rows * columns % threads && batch * rows * columns < 8 * threads; };
    while (uneven() && m / rows > LEFT) ++rows;
    while (uneven() && n / columns > 4 * COLUMNS) ++columns;
    height = ((m + rows - 1) / rows + ROWS - 1) / ROWS * ROWS, breadth = ((n + columns - 1) / columns + COLUMNS - 1) / COLUMNS * COLUMNS;
    rows = (m + height - 1) / height, columns = (n + breadth - 1) / breadth;
  }
};

// A batch of products. a, b, c: elements between its matrices.
struct Strides { int64_t a, b, c; };

template <typename T, typename O> void products(int64_t threads, int64_t batch, const Strides& apart, const Product<T, O>& first) {
  if (batch == 0 || first.m == 0 || first.n == 0) return;
  Cut cut(threads, batch, first.m, first.n);
  parallel_each(batch * cut.rows * cut.columns, (int)threads, [&](int64_t number) {
    int64_t item = number / (cut.rows * cut.columns), row = number / cut.columns % cut.rows, column = number % cut.columns;
    Product<T, O> single = first;
    single.a.data += item * apart.a, single.b.data += item * apart.b, single.c += item * apart.c;
    int64_t i = row * cut.height, j = column * cut.breadth;
    tile(single, i, std::min(cut.height, single.m - i), j, std::min(cut.breadth, single.n - j));
  });
}

}  // namespace

// numbers: batch, m, n, k; strides of A in its batch, rows and along k; of B in its batch, along k and its columns; of C
// in its batch and rows. C is `wide` (float) or of the factors' type.
#define MZ_KERNEL(SUFFIX, T)                                                                                             \
  MZ_API void product_##SUFFIX(int64_t threads, const int64_t* numbers, const T* a, const T* b, const T* bias, void* c,  \
                               float scale, int64_t add, int64_t wide) {                                                 \
    const int64_t* s = numbers + 4;                                                                                      \
    Factor<T> left{a, s[1], s[2]}, right{b, s[5], s[4]};                                                                 \
    Strides apart{s[0], s[3], s[6]};                                                                                     \
    auto into = [&](auto* out) {                                                                                         \
      using O = std::remove_pointer_t<decltype(out)>;                                                                    \
      products<T, O>(threads, numbers[0], apart,                                                                         \
                     {numbers[1], numbers[2], numbers[3], left, right, out, s[7], bias, scale, add != 0});               \
    };                                                                                                                   \
    wide ? into(static_cast<float*>(c)) : into(static_cast<T*>(c));                                                      \
  }
MZ_FOR_DTYPES(MZ_KERNEL)
