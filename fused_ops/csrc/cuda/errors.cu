// The text of a launch's error code.
#include "platform.h"

MZ_API const char* error_text(int64_t code) { return cudaGetErrorString((cudaError_t)code); }
