// A stand-in for the CUDA runtime: it is linked to the objects that nvcc made of the kernels, and records every launch
// instead of running it. It has what these objects use and nothing else, so a launcher that asks the runtime for more
// does not link.
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#define RUNTIME extern "C" __attribute__((visibility("default")))

struct dim3 { unsigned x, y, z; };
struct Configuration {  // cudaLaunchConfig_t
  dim3 grid, block;
  size_t shared;
  void* stream;
  void* attributes;
  unsigned count;
};
struct Record {
  const char* kernel;
  dim3 grid, block;
  uint64_t shared;
  void* stream;
};

namespace {
std::map<const void*, std::string> kernels;
std::vector<Record> records;
Configuration pushed;
int failing = -1, failure = 0, driver = 0, runtime = 0;

int record(const void* function, dim3 grid, dim3 block, size_t shared, void* stream) {
  records.push_back({kernels[function].c_str(), grid, block, shared, stream});
  return failing == (int)records.size() - 1 ? failure : 0;
}
}  // namespace

RUNTIME void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
RUNTIME void __cudaRegisterFatBinaryEnd(void**) {}
RUNTIME void __cudaUnregisterFatBinary(void**) {}
RUNTIME char __cudaInitModule(void**) { return 0; }
RUNTIME void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels[function] = name;
}
RUNTIME unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream, nullptr, 0};
  return 0;
}
RUNTIME int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *static_cast<void**>(stream) = pushed.stream;
  return 0;
}
RUNTIME int __cudaGetKernel(const void** kernel, const void* function) { return *kernel = function, 0; }
RUNTIME int __cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared, void* stream) {
  return record(function, grid, block, shared, stream);
}
RUNTIME int cudaLaunchKernelExC(const Configuration* given, const void* function, void**) {
  return record(function, given->grid, given->block, given->shared, given->stream);
}
RUNTIME const char* cudaGetErrorString(int code) { return code == 209 ? "no kernel image is available for execution on the device" : "another error"; }
RUNTIME int cudaDriverGetVersion(int* version) { return *version = driver, 0; }
RUNTIME int cudaRuntimeGetVersion(int* version) { return *version = runtime, 0; }

// For the tests: forgets the launches, and has the launch of this number fail with a code (-1: none).
RUNTIME void stand_in_begin(int32_t number, int32_t code) { records.clear(), failing = number, failure = code; }
RUNTIME int64_t stand_in_launches(const Record** found) { return *found = records.data(), (int64_t)records.size(); }
RUNTIME void stand_in_versions(int32_t of_driver, int32_t of_runtime) { driver = of_driver, runtime = of_runtime; }
