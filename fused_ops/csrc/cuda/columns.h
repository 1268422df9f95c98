// Sums over the rows of a matrix in float: first over parts of the rows, then over the parts. The order depends only on
// the shape and on the alignment of packs.
#pragma once

#include "launch.h"
#include "numbers.h"

namespace mz {

constexpr int STRIP = 32, DEEP = 8;  // threads of a block beside each other, and below: they take every eighth row
constexpr int DEEP_IN_PARTS = 32;    // where parts are added, of which there are many, by few blocks

// The result of a body for a pack: the terms of ARRAYS sums.
template <int ARRAYS, int W> struct Sums { Floats<W> of[ARRAYS]; };

// The sum of x over the threads of a column of the block, valid in the first of them.
template <int DEEP, int W> MZ_DEVICE Floats<W> over_depth(Floats<W> x) {
  __shared__ float below[DEEP][STRIP][W];
  __syncthreads();  // the values of the last call have been read
#pragma unroll
  for (int j = 0; j < W; ++j) below[threadIdx.y][threadIdx.x][j] = x[j];
  __syncthreads();
  if (threadIdx.y == 0) {
#pragma unroll
    for (int y = 1; y < DEEP; ++y) {
#pragma unroll
      for (int j = 0; j < W; ++j) x[j] += below[y][threadIdx.x][j];
    }
  }
  return x;
}

// partial[part][array][column]: the sums over the rows of a part. Body: a struct of numbers and pointers with
//   W, ARRAYS         elements of a pack, and how many sums there are
//   AHEAD, Inputs     rows that a thread reads before it uses the first, and what it holds of each meanwhile
//   read(row, column) gives the Inputs of a pack
//   (inputs, row, column) gives its Sums<ARRAYS, W>, and may write
template <typename Body>
__global__ void __launch_bounds__(STRIP* DEEP, 4) sum_part(Body body, int64_t rows, int64_t columns, float* partial) {
  constexpr int W = Body::W, ARRAYS = Body::ARRAYS, AHEAD = Body::AHEAD;
  int64_t column = ((int64_t)blockIdx.x * STRIP + threadIdx.x) * W, parts = gridDim.y, part = blockIdx.y;
  int64_t first = rows * part / parts;
  int count = (int)(rows * (part + 1) / parts - first);  // many rows have many parts
  Sums<ARRAYS, W> total;
#pragma unroll
  for (int k = 0; k < ARRAYS; ++k) total.of[k] = all_of<W>(0.0f);
  if (column < columns) {
    for (int row = (int)threadIdx.y; row < count; row += AHEAD * DEEP) {
      typename Body::Inputs inputs[AHEAD];
#pragma unroll
      for (int n = 0; n < AHEAD; ++n) {
        if (row + n * DEEP < count) inputs[n] = body.read(first + row + n * DEEP, column);
      }
#pragma unroll
      for (int n = 0; n < AHEAD; ++n) {
        if (row + n * DEEP >= count) break;
        Sums<ARRAYS, W> own = body(inputs[n], first + row + n * DEEP, column);
#pragma unroll
        for (int k = 0; k < ARRAYS; ++k) total.of[k] = total.of[k] + own.of[k];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < ARRAYS; ++k) {
    Floats<W> sum = over_depth<DEEP>(total.of[k]);
    if (threadIdx.y == 0 && column < columns) store<W>(partial + (part * ARRAYS + k) * columns + column, sum);
  }
}

// result[column] = the sum of partial[part][column] over the parts.
static __global__ void __launch_bounds__(STRIP* DEEP_IN_PARTS) sum_parts(const float* partial, int64_t parts, int64_t columns, float* result) {
  int64_t column = (int64_t)blockIdx.x * STRIP + threadIdx.x;
  Floats<1> total = all_of<1>(0.0f);
  if (column < columns) {
#pragma unroll 8
    for (int64_t part = threadIdx.y; part < parts; part += DEEP_IN_PARTS) total[0] += partial[part * columns + column];
  }
  total = over_depth<DEEP_IN_PARTS>(total);
  if (threadIdx.y == 0 && column < columns) result[column] = total[0];
}

inline int add_parts(const Launch& to, const float* partial, int64_t parts, int64_t columns, float* result) {
  dim3 threads(STRIP, DEEP_IN_PARTS);
  return launch(to, sum_parts, dim3((unsigned)parts_of(columns, STRIP)), threads, partial, parts, columns, result);
}

// result[array][column]: the sums over all rows.
template <typename Body> int sum_over_rows(Launch& to, const Body& body, int64_t rows, int64_t columns, float* result) {
  if (!columns) return cudaSuccess;
  int64_t strips = parts_of(columns, STRIP * Body::W);
  int64_t parts = larger<int64_t>(1, smaller<int64_t>(parts_of(rows, 4 * DEEP), parts_of(1024, strips)));
  float* partial = scratch<float>(to, parts * Body::ARRAYS * columns);
  if (!partial) return MORE_SCRATCH;
  int error = launch(to, sum_part<Body>, dim3((unsigned)strips, (unsigned)parts), dim3(STRIP, DEEP), body, rows, columns, partial);
  return error ? error : add_parts(to, partial, parts, Body::ARRAYS * columns, result);
}

}  // namespace mz
