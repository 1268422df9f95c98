// What an error code of a launch means.
#include "platform.h"

MZ_API const char* error_text(int64_t code) { return cudaGetErrorString((cudaError_t)code); }
