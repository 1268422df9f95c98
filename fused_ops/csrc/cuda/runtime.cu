// What CUDA says about itself: the meaning of an error code, and versions.
#include "platform.h"

MZ_API const char* error_text(int64_t code) { return cudaGetErrorString((cudaError_t)code); }

// Versions, 12090 for 12.9: the newest that the driver runs, 0 without a driver, and that of the runtime that this library is linked to.
MZ_API int cuda_versions(int32_t* driver, int32_t* runtime) {
  int error = (int)cudaDriverGetVersion(driver);
  return error ? error : (int)cudaRuntimeGetVersion(runtime);
}
