// Launching a kernel from a C function: on the caller's stream, with scratch memory of the caller. It returns an error
// code.
//
// A launcher that needs more scratch memory launches nothing and returns how much it needs. The caller then calls it
// again.
#pragma once

#include "platform.h"

namespace mz {

// The first argument of every launcher. scratch: `bytes` bytes, 256-byte aligned, in use until the launch is done on
// the stream.
struct Launch {
  cudaStream_t stream;
  void* scratch;
  int64_t bytes, needed;
};

constexpr int MORE_SCRATCH = -1;

template <typename... Parameters, typename... Arguments>
int launch(const Launch& to, void (*kernel)(Parameters...), dim3 grid, dim3 threads, Arguments... arguments) {
#ifdef __CUDACC__
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = threads, config.stream = to.stream;
  return (int)cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
#else
  (void)to;
  return emulation::launch(kernel, grid, threads, arguments...);
#endif
}

// `count` elements of scratch memory, or null if there is not enough: then the launcher returns MORE_SCRATCH.
template <typename T> T* scratch(Launch& to, int64_t count) {
  to.needed = count * (int64_t)sizeof(T);
  return to.needed <= to.bytes ? static_cast<T*>(to.scratch) : nullptr;
}

}  // namespace mz
