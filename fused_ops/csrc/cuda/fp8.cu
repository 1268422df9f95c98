// FP8 copies of 16-bit matrices, by rows and by columns, in one reading, with the largest absolute value beside them.
//
// A block takes a tile of 128 x 128. It writes the tile by rows, stores it in shared memory, and writes it by columns
// from there. Values are multiplied by a scale in device memory, saturate at the format's largest number, and are
// rounded to nearest even.
#include "launch.h"
#include "reduce.h"

using namespace mz;

namespace {

constexpr int TILE = 128, PITCH = TILE + 4, THREADS = 256, RUN = 16;  // RUN: bytes that are written at once by columns

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

  MZ_DEVICE explicit Tile(int64_t across) : row0(blockIdx.x / across * TILE), column0(blockIdx.x % across * TILE) {}
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
// whether RUN rows of a column can be written at once. partial: the largest of each tile, or null.
struct Copies {
  const float* scale;
  uint8_t *values, *transposed;
  bool together;
  unsigned* partial;
};

template <typename F, typename T, int W> __global__ void MZ_BOUNDS(THREADS) quantise(Matrix<T> of, int64_t across, Copies to) {
  __shared__ uint8_t MZ_PLACED(16) held[TILE][PITCH];
  Tile<T, W> tile(across);
  float scale = *to.scale;
  unsigned largest = 0;
  tile.each(of, [&](int r, int c, const Floats<W>& pack) {
    largest = largest_in(largest, pack);
    uint8_t* out = to.values + (tile.row0 + r) * of.columns + tile.column0 + c;
    if constexpr (W == 1) {
      *out = held[r][c] = (uint8_t)two_bits<F>(pack[0] * scale, 0.0f);
    } else {
      unsigned words[W / 4];
#pragma unroll
      for (int k = 0; k < W / 4; ++k) {
        unsigned low = two_bits<F>(pack[4 * k] * scale, pack[4 * k + 1] * scale);
        words[k] = low | two_bits<F>(pack[4 * k + 2] * scale, pack[4 * k + 3] * scale) << 16;
        *reinterpret_cast<unsigned*>(&held[r][c + 4 * k]) = words[k];
      }
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
  // A warp writes 128 neighbouring rows of four columns.
  for (int at = threadIdx.x; at < TILE * TILE / RUN; at += THREADS) {
    int r = at % (TILE / RUN) * RUN, c = at / (TILE / RUN);
    int64_t row = tile.row0 + r, column = tile.column0 + c;
    if (row >= of.rows || column >= of.columns) continue;
    uint8_t* out = to.transposed + column * of.rows + row;
    if (to.together) {
      unsigned words[RUN / 4];
#pragma unroll
      for (int k = 0; k < RUN / 4; ++k) {
        words[k] = held[r + 4 * k][c] | (unsigned)held[r + 4 * k + 1][c] << 8 | (unsigned)held[r + 4 * k + 2][c] << 16 |
                   (unsigned)held[r + 4 * k + 3][c] << 24;
      }
      MZ_ALIGNED(out, RUN);
      Access<RUN / 4>::store(out, words);
    } else {
      for (int k = 0; k < RUN && row + k < of.rows; ++k) out[k] = held[r + k][c];
    }
  }
}

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
  copies.together = of.rows % RUN == 0 && reinterpret_cast<uintptr_t>(copies.transposed) % RUN == 0;
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
  Copies copies{scalars.scale, values, transposed, false, find_scale ? nullptr : partial};
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
