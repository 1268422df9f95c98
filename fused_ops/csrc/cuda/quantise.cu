// Blocks of int8 or int4 codes with one scale each, and sums of them. The layout of a row is that of fused_ops/quantise.py.
//
// Sixteen threads share a block of 256 elements. Each has two packs of 8, 16 elements apart: these are the halves of
// the bytes of int4 codes.
#include <cfloat>

#include "division.h"
#include "launch.h"
#include "numbers.h"

using namespace mz;

namespace {

constexpr int BLOCK = 256, THREADS = 256, SHARING = 16, W = 8, PACKS = 2, APART = 16, ALIGNMENT = 16;
constexpr unsigned INFINITE = 0x7F800000;

__host__ __device__ constexpr int64_t aligned_bytes(int64_t bytes) { return parts_of(bytes, ALIGNMENT) * ALIGNMENT; }

// A packed row of n elements.
template <int BITS> struct Row {
  static constexpr float LARGEST_CODE = BITS == 8 ? 127.0f : 7.0f;
  int64_t n, blocks, codes, bytes;
  explicit Row(int64_t n)
      : n(n), blocks(parts_of(n, BLOCK)), codes(aligned_bytes(parts_of(n * BITS, 8))), bytes(codes + aligned_bytes(4 * blocks)) {}
};

// The block of this thread in its row, its row, and the first element of its first pack there.
struct Place {
  int64_t block, row, first;
  MZ_DEVICE explicit Place(const Divisor& blocks) {
    int64_t at = (int64_t)blockIdx.x * (THREADS / SHARING) + threadIdx.x / SHARING;
    int lane = threadIdx.x % SHARING;
    row = blocks(at), block = at - row * blocks.by;
    first = block * BLOCK + lane / PACKS * (PACKS * APART) + lane % PACKS * W;
  }
};

// Elements [at, at + W) of a row that ends at `stop`; 0 behind it. WIDE: whole packs are read at once.
template <bool WIDE, typename T> MZ_DEVICE Floats<W> pack_of(const T* row, int64_t at, int64_t stop) {
  if (WIDE && at + W <= stop) return load<W>(row + at);
  Floats<W> x;
#pragma unroll
  for (int j = 0; j < W; ++j) x[j] = at + j < stop ? load<1>(row + at + j)[0] : 0.0f;
  return x;
}
template <bool WIDE, typename T> MZ_DEVICE void put_pack(T* row, int64_t at, int64_t stop, const Floats<W>& x) {
  if (WIDE && at + W <= stop) return store<W>(row + at, x);
#pragma unroll
  for (int j = 0; j < W; ++j)
    if (at + j < stop) store<1>(row + at + j, Floats<1>{{x[j]}});
}

// The scale of a block whose largest absolute value has these bits. Below FLT_MAX / LARGEST_CODE, rounded down, no
// product with a code overflows.
template <int BITS> MZ_DEVICE float scale_of(unsigned largest) {
  constexpr float CODE = Row<BITS>::LARGEST_CODE, TOP = BITS == 8 ? 0x1.020406p+121f : 0x1.249246p+125f;
  return fminf(fmaxf(__uint_as_float(largest) / CODE, FLT_MIN), TOP);
}

MZ_DEVICE int nearest(float x) { return (int)rintf(x); }

// Writes the codes of two packs. first: as of `Place`.
template <int BITS> MZ_DEVICE void put_codes(uint8_t* codes, int64_t stop, int64_t first, const int (&code)[PACKS][W]) {
  if constexpr (BITS == 8) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      unsigned words[2] = {};
#pragma unroll
      for (int j = 0; j < W; ++j) words[j / 4] |= (unsigned)(code[p][j] & 0xFF) << j % 4 * 8;
      if (first + p * APART < stop) Access<2>::store(codes + first + p * APART, words);
    }
  } else {
    unsigned words[2] = {};
#pragma unroll
    for (int j = 0; j < W; ++j) words[j / 4] |= (unsigned)((code[0][j] + 8) | (code[1][j] + 8) << 4) << j % 4 * 8;
    int64_t at = first / (PACKS * APART) * APART + first % APART;
    if (at < stop) Access<2>::store(codes + at, words);
  }
}

// error: null, or what is added first and what is lost then.
template <int BITS, bool WIDE, typename T>
__global__ void MZ_BOUNDS(THREADS) quantise_blocks(Row<BITS> of, int64_t rows, Divisor blocks, const T* x, float* error, uint8_t* packed) {
  Place at(blocks);
  bool inside = at.row < rows;  // all threads take part in the search for the largest
  int64_t stop = inside ? of.n : 0;
  const T* row = x + at.row * of.n;
  float* lost = error ? error + at.row * of.n : nullptr;
  Floats<W> value[PACKS];
  unsigned largest = 0;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    value[p] = pack_of<WIDE>(row, at.first + p * APART, stop);
    if (lost) value[p] = value[p] + pack_of<WIDE>(lost, at.first + p * APART, stop);
#pragma unroll
    for (int j = 0; j < W; ++j) largest = larger(largest, __float_as_uint(value[p][j]) & 0x7FFFFFFFu);  // NaN is above infinity
  }
#pragma unroll
  for (int distance = SHARING / 2; distance; distance /= 2) largest = larger(largest, __shfl_xor_sync(WHOLE_WARP, largest, distance));
  if (!inside) return;
  bool finite = largest < INFINITE;
  float scale = scale_of<BITS>(largest), inverse = 1.0f / scale;
  int code[PACKS][W];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      code[p][j] = finite ? nearest(value[p][j] * inverse) : 0;
      value[p][j] -= (float)code[p][j] * scale;
    }
    if (lost && finite) put_pack<WIDE>(lost, at.first + p * APART, stop, value[p]);
  }
  uint8_t* codes = packed + at.row * of.bytes;
  put_codes<BITS>(codes, of.codes, at.first, code);
  float* scales = reinterpret_cast<float*>(codes + of.codes);
  int lane = threadIdx.x % SHARING;
  if (lane == 0) scales[at.block] = finite ? scale : __uint_as_float(0x7FC00000);
  int64_t behind = of.blocks + lane - 1;  // the last block's other threads clear what is behind its scale
  if (at.block == of.blocks - 1 && lane && 4 * behind < of.bytes - of.codes) scales[behind] = 0.0f;
}

// Codes of the two packs at `first`, as numbers; 0 behind the last byte.
template <int BITS> MZ_DEVICE void numbers_of(const uint8_t* codes, int64_t stop, int64_t first, Floats<W> (&number)[PACKS]) {
  unsigned words[PACKS][2] = {};
  int64_t at = BITS == 8 ? first : first / (PACKS * APART) * APART + first % APART;
#pragma unroll
  for (int p = 0; p < (BITS == 8 ? PACKS : 1); ++p)
    if (at + p * APART < stop) Access<2>::load(codes + at + p * APART, words[p]);
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if constexpr (BITS == 8) number[p][j] = (float)(int8_t)(words[p][j / 4] >> j % 4 * 8);
      else number[p][j] = (float)((int)(words[0][j / 4] >> (j % 4 * 8 + 4 * p) & 15) - 8);
    }
  }
}

template <int BITS, bool WIDE, typename T>
__global__ void MZ_BOUNDS(THREADS) add_blocks(Row<BITS> of, int64_t rows, int64_t parts, Divisor blocks, const uint8_t* packed, T* out) {
  Place at(blocks);
  if (at.row >= rows) return;
  Floats<W> total[PACKS] = {all_of<W>(0.0f), all_of<W>(0.0f)};
  for (int64_t part = 0; part < parts; ++part) {
    const uint8_t* codes = packed + (at.row * parts + part) * of.bytes;
    Floats<W> number[PACKS];
    numbers_of<BITS>(codes, of.codes, at.first, number);
    float scale = reinterpret_cast<const float*>(codes + of.codes)[at.block];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int j = 0; j < W; ++j) total[p][j] += number[p][j] * scale;
    }
  }
#pragma unroll
  for (int p = 0; p < PACKS; ++p) put_pack<WIDE>(out + at.row * of.n, at.first + p * APART, of.n, total[p]);
}

// Whether whole packs of every row can be read at once.
template <typename T> bool wide(int64_t rows, int64_t n, const T* x, const float* error = nullptr) {
  return aligned<W>(x) && aligned<W>(error) && (rows == 1 || n % W == 0);
}

template <int BITS, typename T> int quantise(const Launch& to, int64_t rows, int64_t n, const T* x, float* error, uint8_t* packed) {
  Row<BITS> of(n);
  int64_t grid = parts_of(rows * of.blocks, THREADS / SHARING);
  if (!grid) return cudaSuccess;
  auto kernel = wide(rows, n, x, error) ? quantise_blocks<BITS, true, T> : quantise_blocks<BITS, false, T>;
  return launch(to, kernel, dim3((unsigned)grid), dim3(THREADS), of, rows, Divisor(of.blocks), x, error, packed);
}

template <int BITS, typename T> int dequantise(const Launch& to, int64_t rows, int64_t parts, int64_t n, const uint8_t* packed, T* out) {
  Row<BITS> of(n);
  int64_t grid = parts_of(rows * of.blocks, THREADS / SHARING);
  if (!grid) return cudaSuccess;
  auto kernel = wide(rows, n, out) ? add_blocks<BITS, true, T> : add_blocks<BITS, false, T>;
  return launch(to, kernel, dim3((unsigned)grid), dim3(THREADS), of, rows, parts, Divisor(of.blocks), packed, out);
}

}  // namespace

// packed: begins at a multiple of 16 bytes.
#define MZ_BLOCKS(BITS, SUFFIX, T)                                                                                               \
  MZ_API int quantise_int##BITS##_##SUFFIX(Launch* to, int64_t rows, int64_t n, const T* x, float* error, uint8_t* packed) {     \
    return quantise<BITS>(*to, rows, n, x, error, packed);                                                                       \
  }                                                                                                                              \
  MZ_API int dequantise_int##BITS##_##SUFFIX(Launch* to, int64_t rows, int64_t parts, int64_t n, const uint8_t* packed, T* out) { \
    return dequantise<BITS>(*to, rows, parts, n, packed, out);                                                                   \
  }
#define MZ_KERNEL(SUFFIX, T) MZ_BLOCKS(8, SUFFIX, T) MZ_BLOCKS(4, SUFFIX, T)
MZ_FOR_DTYPES(MZ_KERNEL)
