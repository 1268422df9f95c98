// Kernels over the elements of rows with any strides: a thread takes packs of any row.
#pragma once

#include "division.h"
#include "launch.h"
#include "numbers.h"

namespace mz {

constexpr int BLOCK = 256;

// Body: a struct of numbers and pointers with W and `operator()(row, column)`, which does what is to be done to the
// pack there.
template <typename Body> __global__ void MZ_BOUNDS(BLOCK) over_elements(Body body, int64_t packs, Divisor packs_of_row) {
  int64_t pack = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
  if (pack >= packs) return;
  int64_t row = packs_of_row(pack);
  body(row, (pack - row * packs_of_row.by) * Body::W);
}

// columns: a multiple of the body's W.
template <typename Body> int each_element(const Launch& to, const Body& body, int64_t rows, int64_t columns) {
  int64_t packs_of_row = columns / Body::W, packs = rows * packs_of_row;
  if (!packs) return cudaSuccess;
  return launch(to, over_elements<Body>, dim3((unsigned)parts_of(packs, BLOCK)), dim3(BLOCK), body, packs, Divisor(packs_of_row));
}

}  // namespace mz
