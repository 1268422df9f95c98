// Functions for ranks of one host that exchange tensors through shared memory: counters that one rank writes and others
// wait for, and sums (or largest, smallest values) over members' data in the members' order, with the same bits on each
// rank.
#include <ctime>

#include "rows.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace mz;

namespace {

typedef double D __attribute__((vector_size(64)));
typedef int64_t L __attribute__((vector_size(64)));

// The type in which sums are computed: 16-bit numbers are added in float and rounded once.
template <typename T> struct Wide { typedef F type; };
template <> struct Wide<double> { typedef D type; };
template <> struct Wide<int64_t> { typedef L type; };
template <typename T> constexpr int64_t WIDTH = sizeof(typename Wide<T>::type) == 64 && sizeof(T) == 8 ? 8 : LANES;

template <typename T> MZ_INLINE F get_vector(const T* p, int64_t n) { return load(p, n); }
MZ_INLINE D get_vector(const double* p, int64_t n) { D x{}; memcpy(&x, p, n * 8); return x; }
MZ_INLINE L get_vector(const int64_t* p, int64_t n) { L x{}; memcpy(&x, p, n * 8); return x; }
template <typename T> MZ_INLINE void put_vector(T* p, F x, int64_t n) { store_exact(p, x, n); }
MZ_INLINE void put_vector(double* p, D x, int64_t n) { memcpy(p, &x, n * 8); }
MZ_INLINE void put_vector(int64_t* p, L x, int64_t n) { memcpy(p, &x, n * 8); }

// A NaN in either operand is propagated.
struct Sum { template <typename V> MZ_INLINE V of(V a, V b) { return a + b; } };
struct Max { template <typename V> MZ_INLINE V of(V a, V b) { return choose((a > b) | (a != a), a, b); } };
struct Min { template <typename V> MZ_INLINE V of(V a, V b) { return choose((a < b) | (a != a), a, b); } };

template <typename Op, typename T> void combine(int64_t threads, int64_t count, int64_t members, const T* const* parts, T* out) {
  parallel_for(count, 1 << 16, (int)threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += WIDTH<T>) {
      int64_t n = std::min(WIDTH<T>, end - i);
      auto total = get_vector(parts[0] + i, n);
      for (int64_t member = 1; member < members; ++member) total = Op::of(total, get_vector(parts[member] + i, n));
      put_vector(out + i, total, n);
    }
  });
}

MZ_INLINE void relax() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

// Whether the counter has reached `target`. Both wrap around at 2^32.
bool reached(uint32_t seen, uint32_t target) { return (int32_t)(seen - target) >= 0; }

#ifdef __linux__
void sleep_while(uint32_t* word, uint32_t seen, int64_t milliseconds) {
  timespec limit{milliseconds / 1000, milliseconds % 1000 * 1000000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}
void wake(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
#else
void sleep_while(uint32_t*, uint32_t, int64_t) {
  timespec moment{0, 50000};
  nanosleep(&moment, nullptr);
}
void wake(uint32_t*) {}
#endif

}  // namespace

// Sets a counter, after all earlier writes are visible, and wakes the processes that wait for it.
MZ_API void publish(int64_t, uint32_t* word, int64_t value) {
  __atomic_store_n(word, (uint32_t)value, __ATOMIC_SEQ_CST);
  wake(word);
}

// Waits until all of `count` counters, `stride` words apart, have reached `target`: it polls `spins` times, then sleeps
// for at most so many milliseconds (0: it reads once). answer: index of the first counter that has not reached it, or
// `count`.
MZ_API void wait_for(int64_t, uint32_t* words, int64_t stride, int64_t count, int64_t target, int64_t spins, int64_t milliseconds,
                     int64_t* answer) {
  int64_t at = 0;
  if (!milliseconds) spins = 0;
  bool slept = false;
  while (at < count) {
    uint32_t* word = words + at * stride;
    uint32_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (reached(seen, (uint32_t)target)) {
      ++at;
    } else if (spins) {
      --spins;
      relax();
    } else if (milliseconds && !slept) {
      sleep_while(word, seen, milliseconds);
      slept = true;
    } else {
      break;
    }
  }
  *answer = at;
}

#define MZ_COMBINE(SUFFIX, T)                                                                                                \
  MZ_API void combine_sum_##SUFFIX(int64_t threads, int64_t count, int64_t members, const T* const* parts, T* out) {         \
    combine<Sum>(threads, count, members, parts, out);                                                                       \
  }                                                                                                                          \
  MZ_API void combine_max_##SUFFIX(int64_t threads, int64_t count, int64_t members, const T* const* parts, T* out) {         \
    combine<Max>(threads, count, members, parts, out);                                                                       \
  }                                                                                                                          \
  MZ_API void combine_min_##SUFFIX(int64_t threads, int64_t count, int64_t members, const T* const* parts, T* out) {         \
    combine<Min>(threads, count, members, parts, out);                                                                       \
  }
MZ_FOR_DTYPES(MZ_COMBINE)
MZ_COMBINE(f64, double)
MZ_COMBINE(i64, int64_t)
