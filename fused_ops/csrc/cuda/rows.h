// Kernels in which a group of threads shares a row. Rows of up to 8,192 elements are read once, into registers (4,096 where they have to be
// read one by one, whose addresses need registers too).
#pragma once

#include "launch.h"
#include "reduce.h"

namespace mz {

template <int W> constexpr int KEPT = W == 1 ? 8 : 16;  // elements of a row that a thread keeps

// How a row is shared: GROUP threads, each with PACKS packs of W elements. PACKS 0: the row is too long, and is read again each time.
template <int W_, int GROUP_, int PACKS_> struct Tiling {
  static constexpr int W = W_, GROUP = GROUP_, PACKS = PACKS_, ROWS = GROUP < 128 ? 128 / GROUP : 1, THREADS = GROUP * ROWS;  // of a block
  static constexpr bool KEEPS = PACKS > 0;
  typedef std::conditional_t<KEEPS, int, int64_t> Index;  // of a column
  static dim3 threads() { return dim3(GROUP, ROWS); }
  static MZ_DEVICE int64_t row() { return (int64_t)blockIdx.x * ROWS + threadIdx.y; }
};

// Calls body(first column of a pack, its number among this thread's) for the packs of this thread up to column `stop`.
template <typename Tiles, typename Body> MZ_DEVICE void each_pack(int64_t stop, const Body& body) {
  if constexpr (Tiles::KEEPS) {
#pragma unroll
    for (int p = 0; p < Tiles::PACKS; ++p) {
      int i = (p * Tiles::GROUP + (int)threadIdx.x) * Tiles::W;
      if (i < (int)stop) body(i, p);
    }
  } else {
    for (int64_t i = (int64_t)threadIdx.x * Tiles::W; i < stop; i += Tiles::GROUP * Tiles::W) body(i, 0);
  }
}

// A thread's part of a row of T.
template <typename T, typename Tiles> struct Part {
  const T* row;
  Floats<Tiles::W> kept[Tiles::KEEPS ? Tiles::PACKS : 1];

  MZ_DEVICE Part(const T* row, int64_t stop) : row(row) {
    if constexpr (Tiles::KEEPS) {
#pragma unroll
      for (int p = 0; p < Tiles::PACKS; ++p) kept[p] = all_of<Tiles::W>(0.0f);
      each_pack<Tiles>(stop, [&](int64_t i, int p) { kept[p] = load<Tiles::W>(row + i); });
    }
  }
  MZ_DEVICE Floats<Tiles::W> at(int64_t i, int p) const {
    if constexpr (Tiles::KEEPS) return kept[p];
    else return load<Tiles::W>(row + i);
  }
};

// The same as it is stored: the loads are waited for where `at` is called.
template <typename T, typename Tiles> struct Stored {
  const T* row;
  Words<T, Tiles::W> kept[Tiles::KEEPS ? Tiles::PACKS : 1];

  MZ_DEVICE Stored(const T* row, int64_t stop) : row(row) {
    if constexpr (Tiles::KEEPS) each_pack<Tiles>(stop, [&](int64_t i, int p) { kept[p] = fetch<Tiles::W>(row + i); });
  }
  MZ_DEVICE Floats<Tiles::W> at(int64_t i, int p) const {
    if constexpr (Tiles::KEEPS) return widened(kept[p]);
    else return load<Tiles::W>(row + i);
  }
};

// Calls launcher(Tiling) with the one for rows of this length. W: 1 where a row cannot be read in wide packs. MOST: the elements of a row
// of over 512 that a thread keeps, 16 or 64: with 64 one warp has 2,048, which need no barrier.
template <int W, int MOST, typename Launcher> int with_group(int64_t columns, const Launcher& launcher) {
  if (columns <= 32 * KEPT<W>) return launcher(Tiling<W, 32, KEPT<W> / W>{});
  if constexpr (MOST > KEPT<W>) {
    if (columns <= 32 * MOST) return launcher(Tiling<W, 32, MOST / W>{});
    if (columns <= 128 * MOST) return launcher(Tiling<W, 128, MOST / W>{});
  } else {
    if (columns <= 128 * KEPT<W>) return launcher(Tiling<W, 128, KEPT<W> / W>{});
    if (columns <= 512 * KEPT<W>) return launcher(Tiling<W, 512, KEPT<W> / W>{});
  }
  return launcher(Tiling<W, 512, 0>{});
}
template <typename T, int MOST = 16, typename Launcher> int with_tiling(int64_t columns, bool wide, const Launcher& launcher) {
  return wide ? with_group<WIDEST<T>, MOST>(columns, launcher) : with_group<1, KEPT<1>>(columns, launcher);
}

}  // namespace mz
