// FP8 copies of 16-bit matrices, by rows and by columns, in one reading, with the largest absolute value beside them.
//
// A block takes a tile of 128 x 128. It writes the tile by rows, stores it in shared memory, and writes it by columns
// from there. A kernel of its own transposes what is FP8 already. Values are multiplied by a scale in device memory, saturate at the format's largest number, and are
// rounded to nearest even.
#include "launch.h"
#include "reduce.h"

using namespace mz;

namespace {

constexpr int TILE = 128, THREADS = 256, RUN = 16;  // RUN: bytes that are written at once by columns

// Four blocks of a multiprocessor, so at most 64 registers per thread; without a conversion instruction more are needed.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int RESIDENT = 2;
#else
constexpr int RESIDENT = 4;
#endif

// MANTISSA bits, exponents with this bias, and the bits of the largest number.
template <int MANTISSA_, int BIAS_, unsigned LARGEST_> struct Format {
  static __host__ __device__ constexpr int mantissa() { return MANTISSA_; }
  static __host__ __device__ constexpr int bias() { return BIAS_; }
  static __host__ __device__ constexpr unsigned largest() { return LARGEST_; }
  static constexpr int exponent() { return (LARGEST_ >> MANTISSA_) - BIAS_; }
};
typedef Format<3, 7, 0x7E> E4m3;
typedef Format<2, 15, 0x7B> E5m2;

// The conversion instruction of newer GPUs in software, for older GPUs and for the host.
template <typename F> MZ_DEVICE unsigned rounded_bits(float x) {
  unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7FFFFFFF;
  constexpr int MANTISSA = F::mantissa(), BIAS = F::bias(), DROPPED = 23 - MANTISSA;
  constexpr unsigned LARGEST = F::largest(), BELOW = (127u - BIAS) << MANTISSA;
  if (size > 0x7F800000) return sign | 0x7F;
  if (size < (128u - BIAS) << 23) {  // as small as this its numbers are equally far apart: adding a power of two rounds to one
    constexpr unsigned STEP = (127u + 24 - BIAS - MANTISSA) << 23;
    return sign | (__float_as_uint(__uint_as_float(size) + __uint_as_float(STEP)) - STEP);
  }
  unsigned found = ((size + (1u << (DROPPED - 1)) - 1 + (size >> DROPPED & 1)) >> DROPPED) - BELOW;
  return sign | (smaller(found, LARGEST));
}

// Two numbers, the first in the lower byte.
template <typename F> MZ_DEVICE unsigned two_bits(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short both;
  if constexpr (F::mantissa() == 3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
#else
  return rounded_bits<F>(first) | rounded_bits<F>(second) << 8;
#endif
}

// Bits of numbers that are not negative have the numbers' order. NaN's are above infinity's, so the maximum keeps NaN.
MZ_DEVICE unsigned size_of(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

struct Larger {
  MZ_DEVICE unsigned operator()(unsigned a, unsigned b) const { return larger(a, b); }
};
MZ_DEVICE unsigned largest_of_block(unsigned x) { return over_block<THREADS>(x, Larger()); }

// 0-dim numbers of a matrix on the device: the largest absolute value, the scale, its inverse (null: not wanted).
struct Scalars {
  float *amax, *scale, *inverse;
};

// Computes amax from the parts, if there are any, and the scale. exponent: e such that the format's largest number is
// 1.75 * 2^e; the scale is the largest power of two that keeps amax within the format, as in fused_ops/fp8.py. If it is
// negative, the scale is given.
static __global__ void MZ_BOUNDS(THREADS) settle(const unsigned* partial, int64_t parts, Scalars to, int exponent) {
  unsigned largest = 0;
  for (int64_t i = threadIdx.x; i < parts; i += THREADS) largest = larger(largest, partial[i]);
  largest = largest_of_block(largest);
  if (threadIdx.x > 0) return;
  if (parts) *to.amax = __uint_as_float(largest);
  else largest = __float_as_uint(*to.amax);
  if (!to.inverse) return;
  if (exponent >= 0) {
    int power = 254 + exponent - (int)((largest + 0x1FFFFF) >> 23);
    *to.scale = __uint_as_float((unsigned)larger(1, smaller(253, power)) << 23);
  }
  bool finite = largest < 0x7F800000;
  *to.inverse = __uint_as_float(finite ? 0x7F000000 - __float_as_uint(*to.scale) : 0x7FC00000);
}

template <typename T> struct Matrix {
  const T* x;
  int64_t rows, columns, stride;
  int64_t across() const { return parts_of(columns, TILE); }
  int64_t tiles() const { return across() * parts_of(rows, TILE); }
};

// This block's tile of a matrix. body(row and column within the tile, the pack there) of the packs that lie in it; four
// are read at once.
template <typename T, int W> struct Tile {
  static constexpr int ACROSS = TILE / W, PACKS = TILE * ACROSS / THREADS, AHEAD = 4;
  int64_t row0, column0;

  MZ_DEVICE explicit Tile(int64_t across, bool backwards = false) {
    unsigned number = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    row0 = number / across * TILE, column0 = number % across * TILE;
  }
  template <typename Body> MZ_DEVICE void each(const Matrix<T>& of, const Body& body) const {
#pragma unroll 1
    for (int first = 0; first < PACKS; first += AHEAD) {
      Floats<W> value[AHEAD];
#pragma unroll
      for (int p = 0; p < AHEAD; ++p) {
        int at = (first + p) * THREADS + (int)threadIdx.x, r = at / ACROSS, c = at % ACROSS * W;
        bool inside = row0 + r < of.rows && column0 + c < of.columns;
        value[p] = inside ? load<W>(of.x + (row0 + r) * of.stride + column0 + c) : all_of<W>(0.0f);
      }
#pragma unroll
      for (int p = 0; p < AHEAD; ++p) {
        int at = (first + p) * THREADS + (int)threadIdx.x, r = at / ACROSS, c = at % ACROSS * W;
        if (row0 + r < of.rows && column0 + c < of.columns) body(r, c, value[p]);
      }
    }
  }
};

// N words that are accessed at once.
template <int N> struct alignas(4 * N) Words { unsigned at[N]; };

// Bytes of a (0 to 3) and b (4 to 7), four bits of the selector for each, the first in the lowest.
MZ_DEVICE unsigned picked(unsigned a, unsigned b, unsigned selector) {
#ifdef __CUDACC__
  return __byte_perm(a, b, selector);
#else
  uint64_t both = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
#endif
}

// Four rows of four bytes become four columns.
MZ_DEVICE void transpose(const unsigned* rows, unsigned* columns) {
  unsigned left = picked(rows[0], rows[1], 0x5140), right = picked(rows[0], rows[1], 0x7362);
  unsigned left_below = picked(rows[2], rows[3], 0x5140), right_below = picked(rows[2], rows[3], 0x7362);
  columns[0] = picked(left, left_below, 0x5410), columns[1] = picked(left, left_below, 0x7632);
  columns[2] = picked(right, right_below, 0x5410), columns[3] = picked(right, right_below, 0x7632);
}

// A tile of bytes in shared memory. Sixteen rows, of which a thread reads four columns, have their words exchanged in
// groups of four: then the 32 words that a warp reads at once lie in 32 banks, and so do those that it writes.
struct Bytes {
  unsigned words[TILE][TILE / 4];

  static MZ_DEVICE int place(int row, int word) { return word ^ (row / RUN * 4); }
  template <int N> MZ_DEVICE void put(int row, int column, const unsigned* from) {
    Words<N> all;
#pragma unroll
    for (int k = 0; k < N; ++k) all.at[k] = from[k];
    *reinterpret_cast<Words<N>*>(&words[row][place(row, column / 4)]) = all;
  }
  MZ_DEVICE uint8_t& byte(int row, int column) { return reinterpret_cast<uint8_t*>(&words[row][place(row, column / 4)])[column % 4]; }

  // Writes the tile by columns. transposed: the whole [columns, rows]. together: whether RUN rows of a column can be
  // written at once. Each thread has RUN rows of four columns, and eight threads write 128 rows of a column.
  MZ_DEVICE void write_columns(uint8_t* transposed, int64_t row0, int64_t column0, int64_t rows, int64_t columns, bool together) {
    int r = (int)threadIdx.x % (TILE / RUN) * RUN, c = (int)threadIdx.x / (TILE / RUN) * 4;
    if (row0 + r >= rows || column0 + c >= columns) return;
    uint8_t* out = transposed + (column0 + c) * rows + row0 + r;
    if (!together) {
      for (int j = 0; j < 4 && column0 + c + j < columns; ++j)
        for (int k = 0; k < RUN && row0 + r + k < rows; ++k) out[j * rows + k] = byte(r + k, c + j);
      return;
    }
    unsigned by_columns[RUN / 4][4];
#pragma unroll
    for (int k = 0; k < RUN / 4; ++k) {
      unsigned by_rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) by_rows[i] = words[r + 4 * k + i][place(r, c / 4)];
      transpose(by_rows, by_columns[k]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column0 + c + j >= columns) return;
      unsigned run[RUN / 4];
#pragma unroll
      for (int k = 0; k < RUN / 4; ++k) run[k] = by_columns[k][j];
      MZ_ALIGNED(out + j * rows, RUN);
      Access<RUN / 4>::store(out + j * rows, run);
    }
  }
};
static_assert(TILE / RUN * (TILE / 4) == THREADS, "each thread writes RUN rows of four columns");

template <int W> MZ_DEVICE unsigned largest_in(unsigned found, const Floats<W>& pack) {
#pragma unroll
  for (int j = 0; j < W; ++j) found = larger(found, size_of(pack[j]));
  return found;
}

template <typename T, int W> __global__ void MZ_BOUNDS(THREADS) measure(Matrix<T> of, int64_t across, unsigned* partial) {
  unsigned largest = 0;
  Tile<T, W>(across).each(of, [&](int, int, const Floats<W>& pack) { largest = largest_in(largest, pack); });
  largest = largest_of_block(largest);
  if (threadIdx.x == 0) partial[blockIdx.x] = largest;
}

// The copies of a matrix [rows, columns]: values of the same shape, transposed [columns, rows] or null. together:
// whether RUN rows of a column can be written at once. partial: the largest of each tile, or null. backwards: the last
// tiles first, since the cache still has them when another kernel has read the matrix just before.
struct Copies {
  const float* scale;
  uint8_t *values, *transposed;
  bool together;
  unsigned* partial;
  bool backwards;
};

template <typename F, typename T, int W> __global__ void __launch_bounds__(THREADS, RESIDENT) quantise(Matrix<T> of, int64_t across, Copies to) {
  __shared__ Bytes MZ_PLACED(16) held;
  Tile<T, W> tile(across, to.backwards);
  float scale = *to.scale;
  unsigned largest = 0;
  tile.each(of, [&](int r, int c, const Floats<W>& pack) {
    largest = largest_in(largest, pack);
    uint8_t* out = to.values + (tile.row0 + r) * of.columns + tile.column0 + c;
    if constexpr (W == 1) {
      *out = held.byte(r, c) = (uint8_t)two_bits<F>(pack[0] * scale, 0.0f);
    } else {
      unsigned words[W / 4];
#pragma unroll
      for (int k = 0; k < W / 4; ++k) {
        unsigned low = two_bits<F>(pack[4 * k] * scale, pack[4 * k + 1] * scale);
        words[k] = low | two_bits<F>(pack[4 * k + 2] * scale, pack[4 * k + 3] * scale) << 16;
      }
      held.put<W / 4>(r, c, words);
      MZ_ALIGNED(out, W);
      Access<W / 4>::store(out, words);
    }
  });
  if (to.partial) {
    largest = largest_of_block(largest);
    if (threadIdx.x == 0) to.partial[blockIdx.x] = largest;
  }
  if (!to.transposed) return;
  __syncthreads();
  held.write_columns(to.transposed, tile.row0, tile.column0, of.rows, of.columns, to.together);
}

// transposed [columns, rows] of x [rows, columns], both contiguous. wide: whether rows are read in packs of RUN bytes.
static __global__ void MZ_BOUNDS(THREADS)
    transpose_tile(const uint8_t* x, int64_t rows, int64_t columns, int64_t across, uint8_t* transposed, bool wide, bool together) {
  __shared__ Bytes MZ_PLACED(16) held;
  int64_t row0 = blockIdx.x / across * TILE, column0 = blockIdx.x % across * TILE;
  if (wide) {
    constexpr int PACKS = TILE * TILE / RUN / THREADS;
    unsigned words[PACKS][RUN / 4];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      int at = p * THREADS + (int)threadIdx.x, r = at / (TILE / RUN), c = at % (TILE / RUN) * RUN;
      const uint8_t* from = x + (row0 + r) * columns + column0 + c;
      if (row0 + r < rows && column0 + c < columns) {
        MZ_ALIGNED(from, RUN);
        Access<RUN / 4>::load(from, words[p]);
      }
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      int at = p * THREADS + (int)threadIdx.x, r = at / (TILE / RUN), c = at % (TILE / RUN) * RUN;
      if (row0 + r < rows && column0 + c < columns) held.put<RUN / 4>(r, c, words[p]);
    }
  } else {
    for (int at = threadIdx.x; at < TILE * TILE; at += THREADS) {
      int r = at / TILE, c = at % TILE;
      if (row0 + r < rows && column0 + c < columns) held.byte(r, c) = x[(row0 + r) * columns + column0 + c];
    }
  }
  __syncthreads();
  held.write_columns(transposed, row0, column0, rows, columns, together);
}

inline bool at_runs(const uint8_t* x) { return reinterpret_cast<uintptr_t>(x) % RUN == 0; }

template <typename T> constexpr bool in_packs(const Matrix<T>& of) {
  return of.columns % WIDEST<T> == 0 && of.stride % WIDEST<T> == 0 && aligned<WIDEST<T>>(of.x);
}

template <typename T> int measure_tiles(const Launch& to, const Matrix<T>& of, unsigned* partial) {
  dim3 tiles((unsigned)of.tiles()), threads(THREADS);
  if (in_packs(of)) return launch(to, measure<T, WIDEST<T>>, tiles, threads, of, of.across(), partial);
  return launch(to, measure<T, 1>, tiles, threads, of, of.across(), partial);
}

template <typename F, typename T> int quantise_tiles(const Launch& to, const Matrix<T>& of, Copies copies) {
  dim3 tiles((unsigned)of.tiles()), threads(THREADS);
  copies.together = of.rows % RUN == 0 && at_runs(copies.transposed);
  bool wide = in_packs(of) && reinterpret_cast<uintptr_t>(copies.values) % WIDEST<T> == 0;
  if (wide) return launch(to, quantise<F, T, WIDEST<T>>, tiles, threads, of, of.across(), copies);
  return launch(to, quantise<F, T, 1>, tiles, threads, of, of.across(), copies);
}

template <typename T> int largest_of(Launch& to, const Matrix<T>& of, float* result) {
  unsigned* partial = scratch<unsigned>(to, of.tiles());
  if (!partial) return MORE_SCRATCH;
  int error = measure_tiles(to, of, partial);
  return error ? error : launch(to, settle, dim3(1), dim3(THREADS), partial, of.tiles(), Scalars{result, nullptr, nullptr}, -1);
}

// Makes the copies and the missing scalars, in one pass, or in two if the scale has to be computed first.
template <typename F, typename T>
int copy(Launch& to, const Matrix<T>& of, const Scalars& scalars, uint8_t* values, uint8_t* transposed, bool find_scale, bool find_amax) {
  unsigned* partial = find_amax ? scratch<unsigned>(to, of.tiles()) : nullptr;
  if (find_amax && !partial) return MORE_SCRATCH;
  int error = find_scale && find_amax ? measure_tiles(to, of, partial) : 0;
  Copies copies{scalars.scale, values, transposed, false, find_scale ? nullptr : partial, find_scale && find_amax};
  if (!error && !find_scale) error = quantise_tiles<F>(to, of, copies);
  int64_t parts = find_amax ? of.tiles() : 0;
  int exponent = find_scale ? F::exponent() : -1;
  if (!error) error = launch(to, settle, dim3(1), dim3(THREADS), partial, parts, scalars, exponent);
  if (!error && find_scale) error = quantise_tiles<F>(to, of, copies);
  return error;
}

}  // namespace

#define MZ_COPY(NAME, FORMAT, SUFFIX, T)                                                                                             \
  MZ_API int quantise_##NAME##_##SUFFIX(Launch* to, int64_t rows, int64_t columns, int64_t stride, const T* x, float* amax,          \
                                        float* scale, float* inverse, uint8_t* values, uint8_t* transposed, int64_t find_scale,      \
                                        int64_t find_amax) {                                                                         \
    return copy<FORMAT, T>(*to, {x, rows, columns, stride}, {amax, scale, inverse}, values, transposed, find_scale, find_amax);      \
  }
#define MZ_KERNEL(SUFFIX, T)                                                                                                         \
  MZ_API int largest_##SUFFIX(Launch* to, int64_t rows, int64_t columns, int64_t stride, const T* x, float* result) {                \
    return largest_of<T>(*to, {x, rows, columns, stride}, result);                                                                   \
  }                                                                                                                                  \
  MZ_COPY(e4m3, E4m3, SUFFIX, T) MZ_COPY(e5m2, E5m2, SUFFIX, T)
MZ_KERNEL(bf16, mz::bf16)
MZ_KERNEL(fp16, mz::fp16)

MZ_API int transpose_bytes(Launch* to, int64_t rows, int64_t columns, const uint8_t* x, uint8_t* transposed) {
  int64_t across = parts_of(columns, TILE), tiles = across * parts_of(rows, TILE);
  bool wide = columns % RUN == 0 && at_runs(x), together = rows % RUN == 0 && at_runs(transposed);
  if (!tiles) return cudaSuccess;
  return launch(*to, transpose_tile, dim3((unsigned)tiles), dim3(THREADS), x, rows, columns, across, transposed, wide, together);
}
