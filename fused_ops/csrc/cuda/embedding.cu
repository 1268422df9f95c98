// Sums the gradient rows of each token. The tokens are sorted by id, and those of one id keep their order.
//
// The sorted tokens are cut into pieces of a fixed length. A block sums a run of one id as far as its piece goes. A run
// that lies in one piece goes to its row of the table at once. Runs that cross a border leave a sum for each piece, and a
// second kernel adds these. So no block sums more than a piece, however often an id occurs, the order depends on the ids
// only, and no two blocks write to the same place.
#include "launch.h"
#include "numbers.h"

using namespace mz;

namespace {

constexpr int THREADS = 128;

// The tokens of a piece: 64, and more where there would be more pieces than tokens in each.
inline int length_of_pieces(int64_t tokens) {
  int length = 64;
  while ((int64_t)length * length < tokens) length *= 2;
  return length;
}

// The first place behind `first` with another id, at most `stop`.
MZ_DEVICE int64_t end_of_run(const int64_t* ids, int64_t first, int64_t stop) {
  int64_t inside = first, outside = first + 1, id = ids[first];
  for (int64_t step = 1; outside < stop && ids[outside] == id; step *= 2) inside = outside, outside = smaller(stop, outside + step);
  while (outside - inside > 1) {
    int64_t middle = inside + (outside - inside) / 2;
    if (ids[middle] == id) inside = middle;
    else outside = middle;
  }
  return outside;
}

// The tokens, sorted. order[i]: the i-th token in that order. Ids outside the table are skipped; the forward lookup has
// failed on them.
struct Tokens {
  int64_t count, rows, columns;
  int length;  // of a piece
  const int64_t* ids;
  const int64_t* order;

  int64_t pieces() const { return parts_of(count, length); }
  MZ_DEVICE bool is_in_table(int64_t id) const { return id >= 0 && id < rows; }
  MZ_DEVICE bool starts_run(int64_t at) const { return at == 0 || ids[at - 1] != ids[at]; }
};

// What a row of the table holds before the sum: rows of float are added to, rows of 16 bits are written.
template <int W> MZ_DEVICE Floats<W> held(const float* row) { return load<W>(row); }
template <int W, typename Table> MZ_DEVICE Floats<W> held(const Table*) { return all_of<W>(0.0f); }

// Calls body(first column of a pack) for the packs of this thread.
template <int W, typename Body> MZ_DEVICE void each_column(int64_t columns, const Body& body) {
  for (int64_t column = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * W; column < columns; column += (int64_t)gridDim.y * THREADS * W)
    body(column);
}

// One block for each place of the sorted tokens; those where neither a run nor a piece begins have nothing to do.
// partial[2 * piece]: the sum of a run that has begun in an earlier piece; partial[2 * piece + 1]: of one that begins here
// and goes on.
template <typename T, typename Table, int W>
__global__ void MZ_BOUNDS(THREADS) add_pieces(Tokens tokens, Table* into, const T* grad, float* partial) {
  int64_t first = blockIdx.x, id = tokens.ids[first], piece = blockIdx.x / (unsigned)tokens.length, columns = tokens.columns;
  bool starts = tokens.starts_run(first);
  if (!tokens.is_in_table(id) || (!starts && first != piece * tokens.length)) return;
  int64_t stop = smaller(tokens.count, (piece + 1) * tokens.length), end = end_of_run(tokens.ids, first, stop);
  bool whole = starts && (end == tokens.count || tokens.starts_run(end));
  each_column<W>(columns, [&](int64_t column) {
    Table* row = into + id * columns + column;
    Floats<W> total = whole ? held<W>(row) : all_of<W>(0.0f);
#pragma unroll 8
    for (int64_t i = first; i < end; ++i) total = total + load<W>(grad + tokens.order[i] * columns + column);
    if (whole) store<W>(row, total);
    else store<W>(partial + (2 * piece + starts) * columns + column, total);
  });
}

// One block for each piece: adds the sums of the run that begins there and goes on.
template <typename Table, int W> __global__ void MZ_BOUNDS(THREADS) add_partials(Tokens tokens, Table* into, const float* partial) {
  int64_t piece = blockIdx.x, first = piece * tokens.length, next = first + tokens.length, id = tokens.ids[next], columns = tokens.columns;
  if (!tokens.is_in_table(id) || tokens.starts_run(next)) return;
  if (tokens.ids[first] == id && !tokens.starts_run(first)) return;  // it has begun in an earlier piece
  int64_t last = (end_of_run(tokens.ids, next, tokens.count) - 1) / tokens.length;
  each_column<W>(columns, [&](int64_t column) {
    Table* row = into + id * columns + column;
    Floats<W> total = held<W>(row) + load<W>(partial + (2 * piece + 1) * columns + column);
#pragma unroll 8
    for (int64_t i = piece + 1; i <= last; ++i) total = total + load<W>(partial + 2 * i * columns + column);
    store<W>(row, total);
  });
}

template <int W, typename T, typename Table> int run(Launch& to, const Tokens& tokens, Table* into, const T* grad) {
  int64_t pieces = tokens.pieces(), strips = smaller<int64_t>(64, parts_of(tokens.columns, THREADS * W));
  float* partial = scratch<float>(to, pieces > 1 ? 2 * pieces * tokens.columns : 0);
  if (!partial) return MORE_SCRATCH;
  dim3 places((unsigned)tokens.count, (unsigned)strips), borders((unsigned)pieces - 1, (unsigned)strips);
  int error = launch(to, add_pieces<T, Table, W>, places, dim3(THREADS), tokens, into, grad, partial);
  return error || pieces == 1 ? error : launch(to, add_partials<Table, W>, borders, dim3(THREADS), tokens, into, partial);
}

template <typename T, typename Table> int add(Launch& to, const Tokens& tokens, Table* into, const T* grad) {
  constexpr int W = WIDEST<T>;
  if (tokens.columns % W == 0 && aligned<W>(into) && aligned<W>(grad)) return run<W>(to, tokens, into, grad);
  return run<1>(to, tokens, into, grad);
}

}  // namespace

// Adds to a table of float.
#define MZ_KERNEL(SUFFIX, T)                                                                                            \
  MZ_API int embedding_gradient_sorted_##SUFFIX(Launch* to, int64_t tokens, int64_t rows, int64_t columns, float* into, \
                                                const int64_t* ids, const int64_t* order, const T* grad) {              \
    return add(*to, {tokens, rows, columns, length_of_pieces(tokens), ids, order}, into, grad);                         \
  }
MZ_FOR_DTYPES(MZ_KERNEL)

// Writes the rows of a 16-bit table whose ids occur, rounded once.
#define MZ_ROUNDED(SUFFIX, T)                                                                                        \
  MZ_API int embedding_gradient_rounded_##SUFFIX(Launch* to, int64_t tokens, int64_t rows, int64_t columns, T* into, \
                                                 const int64_t* ids, const int64_t* order, const T* grad) {          \
    return add(*to, {tokens, rows, columns, length_of_pieces(tokens), ids, order}, into, grad);                      \
  }
MZ_ROUNDED(bf16, bf16)
MZ_ROUNDED(fp16, fp16)
