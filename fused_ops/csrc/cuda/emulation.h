// An emulation of CUDA for a C++ compiler. A launch runs on the host, block after block. The threads of a block are
// fibers, which switch where they wait for each other. It is for tests of launch geometry, indices, alignment, barriers
// and shuffles.
//
// Threads of a block run in a different order in every sweep, so that a missing barrier shows. Errors on which a GPU
// would trap or hang end the process with a message: a misaligned access, a shuffle without a part of the warp, a
// barrier that not all threads reach.
//
// With MZ_WATCHED it also tells another library what runs: tests/fused_ops/accesses.cpp, which sees every access to
// memory and finds races.
#pragma once

#include <csetjmp>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#ifdef MZ_WATCHED
#define __shared__ static  // in the library's own data, where nothing else is that a kernel touches
#define MZ_TELL(event) event
extern "C" {
void watch_launch(const void* kernel, const void* fibers, size_t bytes);
void watch_launch_end();
void watch_block(unsigned x, unsigned y);
void watch_thread(int thread, const void* stack, size_t bytes);  // this one runs from here on
void watch_barrier();                                            // all threads of the block have met
void watch_warp_barrier();                                       // this thread has met those of its warp
}
#else
#define __shared__ static thread_local
#define MZ_TELL(event)
#endif

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef void* cudaStream_t;
typedef int cudaError_t;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, cudaSuccess; }

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace mz::emulation {

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulated kernel, block (%u, %u), thread (%u, %u): %s\n", blockIdx.x, blockIdx.y, threadIdx.x, threadIdx.y, what);
  abort();
}

enum State { READY, AT_WARP, AT_BLOCK, DONE };

// A fiber is created once, with a context of its own. Switches are jumps without a system call. It runs block after
// block.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started = false;
  std::vector<char> stack = std::vector<char>(64 << 10);
  State state = DONE;
};

void enter();

// The block that runs.
struct Block {
  std::vector<Fiber> fibers = std::vector<Fiber>(1024);
  jmp_buf scheduler;
  int count = 0, current = 0;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  uint64_t slots[1024];  // what each thread shows to its warp
  unsigned sweep = 0;

  void yield(State state) {
    Fiber& own = fibers[current];
    own.state = state;
    if (!_setjmp(own.place)) _longjmp(scheduler, 1);
  }
  // Returns when the fiber yields. Not to be inlined: a jump back restores the registers of the caller as they are
  // here.
  __attribute__((noinline)) void run_fiber(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    setcontext(&fiber.context);
  }
  void release(int begin, int end) {
    for (int i = begin; i < end; ++i) fibers[i].state = READY;
  }
  bool all(State state, int begin, int end) const {
    for (int i = begin; i < end; ++i)
      if (fibers[i].state != state) return false;
    return true;
  }
  bool any(State state, int begin, int end) const {
    for (int i = begin; i < end; ++i)
      if (fibers[i].state == state) return true;
    return false;
  }
  void run_ready() {
    ++sweep;
    int stride = sweep % 2 || count == 1 ? 1 : count - 1, at = (int)(sweep * 2654435761u % (unsigned)count);  // forwards and backwards, from anywhere
    for (int i = 0; i < count; ++i, at = (at + stride) % count) {
      if (fibers[at].state != READY) continue;
      current = at;
      threadIdx = dim3(at % blockDim.x, at / blockDim.x % blockDim.y, at / (blockDim.x * blockDim.y));
      MZ_TELL(watch_thread(at, fibers[at].stack.data(), fibers[at].stack.size()));
      run_fiber(fibers[at]);
    }
  }
  void run() {
    while (!all(DONE, 0, count)) {
      run_ready();
      bool moved = false;
      for (int begin = 0; begin < count; begin += 32) {
        int end = begin + 32 < count ? begin + 32 : count;
        if (any(AT_WARP, begin, end) && any(DONE, begin, end)) fail("threads of a warp wait for others that have ended");
        if (all(AT_WARP, begin, end)) release(begin, end), moved = true;
      }
      if (moved || all(DONE, 0, count)) continue;
      if (any(AT_BLOCK, 0, count) && any(DONE, 0, count)) fail("threads wait at a barrier for others that have ended");
      if (!all(AT_BLOCK, 0, count)) fail("some threads wait at a barrier and others for their warp");
      release(0, count);
      MZ_TELL(watch_barrier());
    }
  }
};

inline Block& block() {
  static thread_local Block one;
  return one;
}

inline void enter() {
  for (Block& own = block();;) {
    own.body(own.argument);
    own.yield(DONE);
  }
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, Arguments... arguments) {
  Block& own = block();
  std::tuple<Parameters...> given(arguments...);
  auto call = [&] { std::apply(kernel, given); };
  own.body = [](void* argument) { (*static_cast<decltype(call)*>(argument))(); };
  own.argument = &call;
  own.count = (int)(threads.x * threads.y * threads.z);
  if (own.count < 1 || own.count > 1024 || !grid.x || !grid.y || grid.y > 65535 || grid.x > 0x7FFFFFFF) return 9;
  gridDim = grid, blockDim = threads;
  MZ_TELL(watch_launch(reinterpret_cast<const void*>(kernel), own.fibers.data(), own.fibers.size() * sizeof(Fiber)));
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y);
      MZ_TELL(watch_block(x, y));
      own.release(0, own.count);
      own.run();
    }
  MZ_TELL(watch_launch_end());
  return cudaSuccess;
}

inline void check_alignment(const void* pointer, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment) fail("an access that is not aligned");
}

}  // namespace mz::emulation

#define MZ_PLACED(alignment) __attribute__((aligned(alignment)))
#define MZ_ALIGNED(pointer, alignment) mz::emulation::check_alignment(pointer, alignment)

inline void __syncthreads() { mz::emulation::block().yield(mz::emulation::AT_BLOCK); }
inline void __syncwarp() {
  mz::emulation::block().yield(mz::emulation::AT_WARP);
  MZ_TELL(watch_warp_barrier());
}

template <typename T> T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32) {
  auto& block = mz::emulation::block();
  if (mask != 0xFFFFFFFFu || width != 32) mz::emulation::fail("shuffles are emulated for whole warps");
  if (block.count % 32) mz::emulation::fail("a shuffle in a block that is not made of whole warps");
  memcpy(&block.slots[block.current], &value, sizeof(T));
  block.yield(mz::emulation::AT_WARP);
  memcpy(&value, &block.slots[block.current ^ distance], sizeof(T));
  block.yield(mz::emulation::AT_WARP);
  return value;
}

inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
